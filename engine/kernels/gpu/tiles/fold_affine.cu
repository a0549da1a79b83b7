// A lane's two columns of one row, scaled.
ME_INLINE float me_fold(me_scales p, float c0, float d0, float c1, float d1, me_inputs in) {
  const float s0 = me_value(p.s.a);
  float v = s0 * (c0 + d0) + (me_value(p.b.a) - ME_OFFSET * s0) * in.sum0;
  if (ME_GROUPS == 1) return v + s0 * (c1 + d1);
  const float s1 = me_value(p.s.b);
  return v + s1 * (c1 + d1) + (me_value(p.b.b) - ME_OFFSET * s1) * in.sum1;
}
