// x is on its way while the weights are.
me_pack<me_uint, each / 2> raw[takes];
float wide[ME_HALVES > 1 ? takes : 1][each];
ME_UNROLL for (int i = 0; i < takes; ++i) {
  const int v = i * threads + tid;
  if (ME_HALVES > 1) {
    if (v < real) me_load<each>(x + v * each, wide[ME_HALVES > 1 ? i : 0]);
  } else if (v < real) {
    raw[i] = me_raw<each / 2>(x + v * each);
  }
}
