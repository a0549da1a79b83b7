// Launch B: a warp computes ME_ROWS outputs over all experts, float32 until the one rounding.
const int first = (group * ME_WARPS + warp) * ME_ROWS;
if (first < ME_H) {
  float total[ME_ROWS];
  ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) total[r] = 0.0f;
  // Chunks of all experts in one range, so that a narrow expert leaves no lane idle.
  for (int i = lane; i < ME_K * (ME_F / ME_CHUNK); i += 32) {
    const int k = i / (ME_F / ME_CHUNK), c = i % (ME_F / ME_CHUNK);
    const int64_t e = indices[k];
    const float score = ME_SCORE;
    float v[ME_CHUNK];
    const float sum = me_load<ME_CHUNK>(act + k * ME_F + c * ME_CHUNK, v);
    ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
      const int64_t at = e * ME_H + first + r;
      total[r] += score * ME_DOT_DOWN;
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
