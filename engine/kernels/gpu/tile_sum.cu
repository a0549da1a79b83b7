// The sums of a tile's rows over this warp's units, left in red.
float low_total = 0.0f, high_total = 0.0f;
const me_feed feed = me_feed_of(lane);
const uint4* const fed = xs + feed.part * vectors + feed.step * 16 + t;
for (int ahead = 0; ahead < count; ahead += ME_AHEAD) {
  ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) {
    const int i = ahead + a, at_group = (first + i) * ME_GROUPS + own_columns.group;
    if (ME_AHEAD > 1 && i >= count) continue;
    const bool there = steps % ME_UNIT == 0 || (first + i) * ME_UNIT + feed.step < steps;
    const uint4* const its_x = feed.any && there ? fed + (first + i) * (ME_UNIT * 16) : zeros;
    float sum[4], other[4];
    ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
      const int slot = a * ME_UNIT + s;
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      me_step(hold[slot][0], hold[slot][1], its_x, c, d);
      ask(i * ME_UNIT + s + held, slot);
      me_retain(ME_UNIT == 1 || s == own_columns.slot, c, d, sum, other);
    }
    const float sum0 = ME_SUMMED && own_columns.counts[0] && at_group < per_row ? sums[at_group] : 0.0f;
    const float sum1 = ME_SUMMED && own_columns.counts[1] && at_group + 1 < per_row ? sums[at_group + 1] : 0.0f;
    low_total += me_fold(scales[a][0], sum[0], other[0], sum[1], other[1], sum0, sum1);
    high_total += me_fold(scales[a][1], sum[2], other[2], sum[3], other[3], sum0, sum1);
    ask_scales(i + ME_AHEAD, a);
  }
}
low_total = me_row_sum(low_total, lane);
high_total = me_row_sum(high_total, lane);
if (me_gives(lane)) {
  red[warp * 16 + me_row(g, t)] = low_total;
  red[warp * 16 + 8 + me_row(g, t)] = high_total;
}
__syncthreads();
