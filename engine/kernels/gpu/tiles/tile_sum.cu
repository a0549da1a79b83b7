// The sums of a tile's rows over this warp's units, left in red.
float low_total = 0.0f, high_total = 0.0f;
arrived();
const uint4* const mine = xs + (ME_HALVES > 1 && g >= ME_GROUPS ? steps * ME_STEP_X : 0) + t * ME_LANE_X;
for (int ahead = 0; ahead < count; ahead += ME_AHEAD) {
  ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) {
    const int i = ahead + a;
    if (ME_AHEAD > 1 && i >= count) continue;
    me_acc c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
    ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
      const int j = i * ME_UNIT + s, step = first * ME_UNIT + j, slot = a * ME_UNIT + s;
      if (steps % ME_UNIT == 0 || step < steps) {
        me_step(chunk_of(j, slot, 0), chunk_of(j, slot, 1), me_feeds(lane, s) ? mine + step * ME_STEP_X : zeros, c, d);
      }
      ask(j + held, slot);
    }
    const me_inputs in = me_inputs_of(sums, (first + i) * ME_GROUPS, per_row, t);
    low_total += me_fold(scales_of(i, a, 0), c[0], d[0], c[1], d[1], in);
    high_total += me_fold(scales_of(i, a, 1), c[2], d[2], c[3], d[3], in);
    ask_scales(i + ME_AHEAD, a);
  }
}
low_total += me_swap(low_total, 1);
high_total += me_swap(high_total, 1);
low_total += me_swap(low_total, 2);
high_total += me_swap(high_total, 2);
if (t == 0) {
  red[warp * 16 + mine8] = low_total;
  red[warp * 16 + 8 + mine8] = high_total;
}
__syncthreads();
