// A tile's weights on their way: rows low_from(slot) and high_from(slot), each where this lane begins to read.
const me_columns own_columns = me_columns_of(lane);
me_chunk hold[held][2];
auto ask = [&](int j, int s) {
  const int slot = s % ME_UNIT, step = (first + j / ME_UNIT) * ME_UNIT + me_turn(g, slot);
  if (j < count * ME_UNIT && (steps % ME_UNIT == 0 || step < steps)) {
    const bool there = chunks % 4 == 0 || step * 4 + t < chunks;
    hold[s][0] = me_take(low_from(slot) + step * (ME_BITS * 16), there);
    hold[s][1] = me_take(high_from(slot) + step * (ME_BITS * 16), there);
  }
};
me_scales scales[ME_AHEAD][2];
auto ask_scales = [&](int i, int a) {
  if (i < count) {
    scales[a][0] = ME_LOW_SCALES(low_row * per_row, (first + i) * ME_GROUPS + own_columns.group);
    scales[a][1] = ME_HIGH_SCALES(high_row * per_row, (first + i) * ME_GROUPS + own_columns.group);
  }
};
ME_UNROLL for (int j = 0; j < held; ++j) ask(j, j);
ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_scales(a, a);
