// x as digits, and what is known of each group.
ME_UNROLL for (int i = 0; i < takes; ++i) {
  const int v = i * threads + tid;
  float in[each];
  ME_UNROLL for (int n = 0; n < each; ++n) in[n] = v < real ? me_value(raw[i].v[n]) : 0.0f;
  const me_digits made = me_digits_of(in);
  if (v < vectors) {
    me_put(reinterpret_cast<me_uint*>(xs), steps * 32, v, made);
    if (v < real && v % (ME_SPAN / 8) == 0) sums[v / (ME_SPAN / 8)] = made.group;
  }
}
