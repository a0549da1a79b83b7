// A tile's weights on their way: 16 rows, which this lane begins to read at low (row g) and high (row g + 8).
me_chunk hold[held][2];
auto ask = [&](int j, int s) {
  const int step = first * ME_UNIT + j;
  if (j < count * ME_UNIT && step < steps) {
    const bool there = chunks % 4 == 0 || step * 4 + t < chunks;
    hold[s][0] = me_take(low + step * (ME_BITS * 16), there);
    hold[s][1] = me_take(high + step * (ME_BITS * 16), there);
  }
};
const int column = 2 * t % ME_GROUPS;
me_scales scales[ME_AHEAD][2];
auto ask_scales = [&](int i, int a) {
  if (i < count) {
    scales[a][0] = ME_LOW_SCALES(low_row * per_row, (first + i) * ME_GROUPS + column);
    scales[a][1] = ME_HIGH_SCALES(high_row * per_row, (first + i) * ME_GROUPS + column);
  }
};
ME_UNROLL for (int j = 0; j < held; ++j) ask(j, j);
ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_scales(a, a);
auto arrived = [&] {};
auto chunk_of = [&](int, int slot, int half) { return hold[slot][half]; };
auto scales_of = [&](int, int a, int half) { return scales[a][half]; };
const int mine8 = g;
