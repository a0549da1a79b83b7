// Weights and scales in shared memory, where every warp finds its units'. A lane's rows are of the first half where
// its g is even.
auto row_of = [&](int m, int h) { return g % 2 * (rows / 2) + g / 2 + (m * 2 + h) * 4; };
auto near_of = [&](int unit) {
  const int k = is_own(unit) ? ME_K : unit / units;
  return reinterpret_cast<const char*>(me_shared + ME_AT_EXPERTS) + k * ME_EXPERT_BYTES;
};
auto arrived = [&](int unit) {
  me_full_wait(reinterpret_cast<uint64_t*>(me_shared + ME_AT_FULL) + (is_own(unit) ? ME_K : unit / units), 0);
};
auto chunk_of = [&](int j, int, int n) {
  const int unit = first + j / ME_UNIT, s = j % ME_UNIT;
  const bool own = is_own(unit);
  const char* const row = near_of(unit) + g % 2 * (own ? ME_OWN_APART : ME_APART);
  const char* const from = row + (g / 2 + n * 4) * (own ? own_bytes : row_bytes);
  return me_take_near(from + step_of(unit, s) * (ME_BITS * 16) + t * (ME_BITS * 4), has(unit, s, t));
};
auto scales_of = [&](int i, int, int m, int h) {
  const int unit = first + i, row = row_of(m, h);
  const bool own = is_own(unit);
  const int group = (own ? unit - routed : unit % units) * ME_GROUPS + column;
  const char* const near = near_of(unit) + 2 * (own ? ME_OWN_APART : ME_APART);
  const auto* const s = reinterpret_cast<const ME_SCALE_TYPE*>(near);
#if ME_SHARED
  if (own) {
    constexpr int per_row = ME_OWN_PER_ROW;
    const auto* const b = s + rows * per_row;
    (void)b;
    return ME_NEAR_SCALES(row * per_row, group);
  }
#endif
  const auto* const b = s + rows * per_row;
  (void)b;
  return ME_NEAR_SCALES(row * per_row, group);
};
auto ask = [&](int, int) {};
auto ask_scales = [&](int, int) {};
