// The sums of a tile's rows over this warp's units, left in red.
float low_total = 0.0f, high_total = 0.0f;
const bool counts = ME_SUMMED && 2 * t < ME_GROUPS;
const uint4* const mine = xs + (ME_HALVES > 1 && g >= ME_GROUPS ? vectors : 0) + t;
for (int ahead = 0; ahead < count; ahead += ME_AHEAD) {
  ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) {
    const int i = ahead + a;
    if (ME_AHEAD > 1 && i >= count) continue;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
      const int j = i * ME_UNIT + s, step = first * ME_UNIT + j, slot = a * ME_UNIT + s;
      if (steps % ME_UNIT == 0 || step < steps) {
        me_step(hold[slot][0], hold[slot][1], me_feeds(lane, s, ME_HALVES) ? mine + step * 16 : zeros, c, d);
      }
      ask(j + held, slot);
    }
    const int at_group = (first + i) * ME_GROUPS + column;
    const float sum0 = counts && at_group < per_row ? sums[at_group] : 0.0f;
    const float sum1 = ME_GROUPS > 1 && counts && at_group + 1 < per_row ? sums[at_group + 1] : 0.0f;
    low_total += me_fold(scales[a][0], c[0], d[0], c[1], d[1], sum0, sum1);
    high_total += me_fold(scales[a][1], c[2], d[2], c[3], d[3], sum0, sum1);
    ask_scales(i + ME_AHEAD, a);
  }
}
low_total += me_swap(low_total, 1);
high_total += me_swap(high_total, 1);
low_total += me_swap(low_total, 2);
high_total += me_swap(high_total, 2);
if (t == 0) {
  red[warp * 16 + g] = low_total;
  red[warp * 16 + 8 + g] = high_total;
}
__syncthreads();
