// Weights and scales on their way to registers.
auto row_of = [&](int m, int h) { return g + m * 16 + h * 8; };
const char* const base = reinterpret_cast<const char*>(down_w) + int64_t(h0 + g) * row_bytes + t * (ME_BITS * 4);
#if ME_SHARED
const char* const own_base =
    reinterpret_cast<const char*>(shared_down_w) + int64_t(h0 + g) * own_bytes + t * (ME_BITS * 4);
#endif
me_chunk hold[held][ME_TILES * 2];
auto ask = [&](int j, int s) {
  const int unit = first + j / ME_UNIT, k = unit / units, step = step_of(unit, s % ME_UNIT);
  const int64_t e = __shfl_sync(0xffffffffu, expert, k & 31);
  if (j < count * ME_UNIT && is_there(unit, s % ME_UNIT)) {
    const char* from = base + e * (int64_t(ME_H) * row_bytes) + step * (ME_BITS * 16);
    int stride = 8 * row_bytes;
#if ME_SHARED
    if (is_own(unit)) from = own_base + step * (ME_BITS * 16), stride = 8 * own_bytes;
#endif
    const bool there = has(unit, s % ME_UNIT, t);
    ME_UNROLL for (int m = 0; m < ME_TILES * 2; ++m) hold[s][m] = me_take(from + m * stride, there);
  }
};
me_scales scales[ME_AHEAD][ME_TILES][2];
auto ask_scales = [&](int j, int a) {
  const int unit = first + j;
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units;
  const int64_t e = __shfl_sync(0xffffffffu, expert, k & 31);
  if (j >= count) return;
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    ME_UNROLL for (int h = 0; h < 2; ++h) {
      const int64_t row = h0 + row_of(m, h);
#if ME_SHARED
      if (own) {
        constexpr int per_row = ME_OWN_PER_ROW;
        scales[a][m][h] = ME_OWN_SCALES(row * per_row, u * ME_GROUPS + column);
        continue;
      }
#endif
      scales[a][m][h] = ME_DOWN_SCALES((e * ME_H + row) * per_row, u * ME_GROUPS + column);
    }
  }
};
auto arrived = [&](int) {};
auto chunk_of = [&](int, int slot, int n) { return hold[slot][n]; };
auto scales_of = [&](int, int a, int m, int h) { return scales[a][m][h]; };
