ME_INLINE float me_softplus(float v) {
  const float small = me_exp(v < 0.0f ? v : -v), one = 1.0f + small;
  return (v > 0.0f ? v : 0.0f) + (one == 1.0f ? small : me_log(one) * (small / (one - 1.0f)));
}
ME_INLINE float me_open(float v) { return ME_OPEN; }
