// The product of some rows of a matrix with the part of x that is staged in the group's memory.
// Staged values lie 32 to a line of 36, so that lanes which read 16 bytes at once meet in no bank.
ME_INLINE int me_staged(int i) { return i / 32 * 36 + i % 32; }

template <int FORMAT, int BITS, int GROUP, typename S>
ME_INLINE void me_rows(ME_DEVICE const me_uint* w, ME_DEVICE const S* s, ME_DEVICE const S* b, int first, int last,
                       int begin, int lane, ME_GROUP const float* xs, ME_THREAD float (&total)[ME_ROWS]) {
  constexpr int chunk = FORMAT >= 4 ? 8 : 32, count = ME_SEGMENT / chunk;
  constexpr int words = ME_H / 32 * BITS, groups = GROUP == 0 ? 0 : ME_H / (GROUP == 0 ? 1 : GROUP);
  ME_UNROLL_BY(4) for (int i = 0; i < (count + 31) / 32; ++i) {
    const int c = i * 32 + lane;
    if (c < count && begin + c * chunk < ME_H) {
      ME_GROUP const float* from = xs + me_staged(c * chunk);
      float v[chunk], sum = 0.0f;
      ME_UNROLL for (int j = 0; j < chunk; ++j) sum += v[j] = from[j];
      ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
        const int64_t at = first + r < last ? first + r : last;
        total[r] += me_dot<FORMAT, BITS, GROUP>(w + at * words, s + at * groups, b + at * groups, begin / chunk + c, v, sum);
      }
    }
  }
}
