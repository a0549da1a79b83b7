// Launch B: a warp computes ME_ROWS outputs over all experts, float32 until the one rounding.
const int token = group % ME_TOKENS, first = (group / ME_TOKENS * ME_WARPS + warp) * ME_ROWS;
indices += token * ME_K;
weights += token * ME_K;
act += token * ME_PITCH;
y += token * ME_H;
if (first < ME_H) {
  float total[ME_ROWS];
  ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) total[r] = 0.0f;
  // Chunks of all experts, the shared one last, in one range, so that a narrow expert leaves no lane idle.
  constexpr int routed = ME_K * (ME_F / ME_CHUNK);
  for (int i = lane; i < routed + ME_SHARED / ME_CHUNK; i += 32) {
    const bool own = ME_SHARED > 0 && i >= routed;
    const int k = own ? 0 : i / (ME_F / ME_CHUNK), c = own ? i - routed : i % (ME_F / ME_CHUNK);
    const int64_t e = own ? 0 : indices[k];
    const float score = own ? ME_SHARE : ME_SCORE;
    float v[ME_CHUNK];
    const float sum = me_load<ME_CHUNK>(act + i * ME_CHUNK, v);
    ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
      const int64_t at = e * ME_H + first + r;
      total[r] += score * (own ? ME_DOT_SHARED : ME_DOT_DOWN);
    }
  }
  ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
    const int row = first + r;
    float sum = me_sum(total[r]);
    if (lane == 0) {
      ME_ADD_BIAS
      me_set(y + row, sum);
    }
  }
}
