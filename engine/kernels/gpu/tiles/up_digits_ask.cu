// x is on its way while the weights are.
decltype(me_held<each>(x)) raw[takes];
ME_UNROLL for (int i = 0; i < takes; ++i) {
  const int v = i * threads + tid;
  if (v < real) raw[i] = me_held<each>(x + v * each);
}
