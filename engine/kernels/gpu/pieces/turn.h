// One head whose values lie in ys, by the threads of a group: its norm, its rotation, and out. Rotating keeps lengths,
// so that a norm after the rotation has its sum of squares from the values before it.
// NORM: 0 none, 1 before the rotation, 2 after it, 3 done by a factor that is given.
template <int D, int FIRST, int TURNED, bool INTERLEAVED, int NORM, bool WEIGHT, int THREADS, typename W, typename T>
ME_INLINE void me_turn(ME_GROUP const float* ys, ME_DEVICE const W* weight, float weight_offset, float eps, float given,
                       ME_DEVICE const float* inverse, float position, float turn_factor, ME_DEVICE T* to, int tid,
                       int lane) {
  float squares = 0.0f;
  if (NORM == 1 || NORM == 2) {
    for (int i = lane; i < D; i += 32) {
      const float v = ys[i] * (NORM == 2 && i >= FIRST && i < FIRST + TURNED ? turn_factor : 1.0f);
      squares += v * v;
    }
    given = me_rsqrt(me_sum(squares) / float(D) + eps);
  }
  for (int i = tid; i < D; i += THREADS) {
    const float scale = WEIGHT ? me_value(weight[WEIGHT ? i : 0]) + weight_offset : 1.0f;
    float y = ys[i] * (NORM == 2 ? 1.0f : scale);
    if (i >= FIRST && i < FIRST + TURNED) {
      constexpr int half_way = TURNED > 1 ? TURNED / 2 : 1, whole = TURNED > 0 ? TURNED : 1;
      const int at = i - FIRST, pair = INTERLEAVED ? at / 2 : at % half_way;
      const int other = FIRST + (INTERLEAVED ? at ^ 1 : (at + half_way) % whole);
      const bool second = INTERLEAVED ? at % 2 == 1 : at >= half_way;
      const float its_scale = WEIGHT && NORM != 2 ? me_value(weight[WEIGHT ? other : 0]) + weight_offset : 1.0f;
      const float across = ys[other] * its_scale, angle = position * inverse[pair];
      y = (y * me_cos(angle) + (second ? across : -across) * me_sin(angle)) * turn_factor;
    }
    me_set(to + i, y * given * (NORM == 2 ? scale : 1.0f));
  }
}
