// The rows from h0 on of every expert on their way to shared memory; some warps share out the experts. The first
// half of the rows and the second are copied apart.
{
  constexpr int rows = ME_TILES * 16, routed = ME_K, experts = ME_K + (ME_SHARED > 0);
  constexpr int scaled = ME_PER_ROW > 0 ? 1 + ME_SUMMED : 0;
  auto* const fulls = reinterpret_cast<uint64_t*>(me_shared + ME_AT_FULL);
  for (int k = ME_FIRST_ASKED; k < experts; k += ME_ASKERS) {
    const bool own = ME_SHARED > 0 && k == routed;
    const int cols = own ? ME_SHARED : ME_F, per_row = own ? ME_OWN_PER_ROW : ME_PER_ROW;
    const int row_bytes = cols * ME_WIDE * ME_BITS / 8, scale_bytes = rows * per_row * int(sizeof(ME_SCALE_TYPE));
    const int64_t row0 = (own ? 0 : int64_t(indices[k]) * ME_H) + h0;
    char* const near = reinterpret_cast<char*>(me_shared + ME_AT_EXPERTS) + k * ME_EXPERT_BYTES;
    const int apart = own ? ME_OWN_APART : ME_APART;
    if (lane == 0) {
      me_full_begin(fulls + k);
      me_full_expect(fulls + k, rows * row_bytes + scaled * scale_bytes);
    }
    __syncwarp();
    if (lane < 2) {
      const char* const from = reinterpret_cast<const char*>(ME_DOWN(w)) + (row0 + lane * (rows / 2)) * row_bytes;
      me_full_copy(near + lane * apart, from, rows / 2 * row_bytes, fulls + k);
    } else if (lane < 2 + scaled) {
      const int n = lane - 2;
      const void* from = nullptr;
      ME_SCALES_FROM
      me_full_copy(near + 2 * apart + n * scale_bytes, from, scale_bytes, fulls + k);
    }
  }
}
