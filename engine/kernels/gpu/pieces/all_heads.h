// The sum of squares of a whole row, by a group.
template <int WIDTH, int THREADS, typename T>
ME_INLINE float me_row_squares(ME_DEVICE const T* x, ME_GROUP float* red, int warp, int lane) {
  float squares = 0.0f;
  for (int i = (warp * 32 + lane) * 8; i < WIDTH; i += THREADS * 8) {
    float v[8];
    me_load<8>(x + i, v);
    ME_UNROLL for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
  }
  squares = me_sum(squares);
  if (lane == 0) red[warp] = squares;
  me_barrier();
  float all = 0.0f;
  ME_UNROLL for (int i = 0; i < THREADS / 32; ++i) all += red[i];
  return all;
}
