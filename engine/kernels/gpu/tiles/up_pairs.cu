// x as fragments, and its sums over each group.
ME_UNROLL for (int i = 0; i < takes; ++i) {
  const int v = i * threads + tid;
  me_uint p[ME_HALVES][each / 2];
  float sum = 0.0f;
  ME_UNROLL for (int n = 0; n < each / 2; ++n) {
    if (ME_HALVES > 1) {
      const me_uint a = me_split(v < real ? ME_X_BY * wide[ME_HALVES > 1 ? i : 0][2 * n] : 0.0f);
      const me_uint b = me_split(v < real ? ME_X_BY * wide[ME_HALVES > 1 ? i : 0][2 * n + 1] : 0.0f);
      p[0][n] = __byte_perm(a, b, 0x5410);
      p[ME_HALVES - 1][n] = __byte_perm(a, b, 0x7632);
    } else {
      p[0][n] = v < real ? (ME_X_BY == 1.0f ? raw[i].v[n] : me_times(raw[i].v[n], ME_X_BY)) : 0;
    }
    ME_UNROLL for (int h = 0; h < ME_HALVES; ++h) sum += me_bits(p[h][n] << 16) + me_bits(p[h][n] & 0xFFFF0000u);
  }
  if (ME_SUMMED) {
    ME_UNROLL for (int d = 1; d < ME_SPAN / 8; d *= 2) sum += me_swap(sum, d);
  }
  if (v < vectors) {
    ME_UNROLL for (int h = 0; h < ME_HALVES; ++h) xs[h * vectors + me_place(v)] = me_fragment(p[h]);
    if (ME_SUMMED && v < real && v % (ME_SPAN / 8) == 0) sums[v / (ME_SPAN / 8)] = sum;
  }
}
