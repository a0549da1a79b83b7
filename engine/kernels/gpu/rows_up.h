// Launch A: a warp computes one act[k, f], gate and up rows sharing each chunk of x. After the experts' rows
// come the shared expert's, then the one row that weighs it.
const int token = group % ME_TOKENS, row = group / ME_TOKENS * ME_WARPS + warp;
x += token * ME_H;
indices += token * ME_K;
act += token * ME_PITCH;
if (row < ME_ROUTED + ME_SHARED) {
  const bool own = ME_SHARED > 0 && row >= ME_ROUTED;
  const int64_t e = own ? 0 : indices[row / ME_F];
  const int64_t at = own ? row - ME_ROUTED : e * ME_F + row % ME_F;
  const int64_t up_at = own ? at + ME_UP_FIRST : at;
  float g = 0.0f, u = 0.0f;
  for (int c = lane; c < ME_H / ME_CHUNK; c += 32) {
    float v[ME_CHUNK];
    const float sum = me_load<ME_CHUNK>(x + c * ME_CHUNK, v);
    g += ME_DOT_GATE;
    u += ME_DOT_UP;
  }
  g = me_sum(g);
  u = me_sum(u);
  if (lane == 0) act[row] = me_activation(ME_END_GATE, ME_END_UP);
}
#if ME_WEIGHED
if (row == ME_ROUTED + ME_SHARED) {
  ME_WEIGH
}
#endif
