// The weighted sum over a token's experts, float32 until the one rounding.
const int tid = warp * 32 + lane, token = group / ME_BLOCKS, h = (group % ME_BLOCKS * (ME_WARPS * 32) + tid) * 4;
if (h < ME_H) {
  float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int k = 0; k < ME_K; ++k) {
    float v[4];
    me_load<4>(outputs + int64_t(places[token * ME_K + k]) * ME_H + h, v);
    const float by = weights[token * ME_K + k];
    ME_UNROLL for (int i = 0; i < 4; ++i) total[i] += by * v[i];
  }
  me_store<4>(y + int64_t(token) * ME_H + h, total);
}
