// One token of a gated delta net, a value head a group: the convolution of its channels, the lengths of query and
// key, the decay, the correction of the memory, and the gated norm of what is read. Rows of the memory are asked for
// before anything else. A query or key head serves ME_RATIO value heads, of which the first leaves its inputs.
ME_GROUP_ARRAY(float, xs, 2 * ME_DK + ME_DV)
ME_GROUP_ARRAY(float, read, ME_DV)
const int tid = warp * 32 + lane, head = group, key = group / ME_RATIO, own = group % ME_RATIO;
float kept[ME_ROWS][ME_EACH];
ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
  const int row = r * ME_WARPS + warp;
  ME_UNROLL for (int i = 0; i < ME_EACH; ++i) {
    const int at = i * 32 + lane;
    const bool there = row < ME_DV && at < ME_DK;
    kept[r][i] = there ? me_value(memory[(int64_t(head) * ME_DV + row) * ME_DK + at]) : 0.0f;
  }
}
for (int c = tid; c < 2 * ME_DK + ME_DV; c += ME_WARPS * 32) {
  const int part = c < ME_DK ? 0 : c < 2 * ME_DK ? 1 : 2, i = c - part * ME_DK;
  const int channel = part < 2 ? (part * ME_KEYS + key) * ME_DK + i : 2 * ME_KEYS * ME_DK + head * ME_DV + i;
  const float now = part == 0 ? ME_Q(i) : part == 1 ? ME_K(i) : ME_V(i);
  const bool leaves = part == 2 || own == 0;
  float sum = now * me_value(ME_CONV[channel * ME_TAPS + ME_TAPS - 1]);
  ME_UNROLL for (int t = 0; t + 1 < ME_TAPS; ++t) {
    const float before = me_value(past[t * ME_CHANNELS + channel]);
    sum += before * me_value(ME_CONV[channel * ME_TAPS + t]);
    if (t > 0 && leaves) me_set(new_past + (t - 1) * ME_CHANNELS + channel, before);
  }
  if (ME_TAPS > 1 && leaves) me_set(new_past + (ME_TAPS - 2) * ME_CHANNELS + channel, now);
  xs[c] = sum / (1.0f + me_exp(-sum));
}
me_barrier();
float q[ME_EACH], k[ME_EACH], qq = 0.0f, kk = 0.0f;
ME_UNROLL for (int i = 0; i < ME_EACH; ++i) {
  const int at = i * 32 + lane;
  q[i] = at < ME_DK ? xs[at] : 0.0f;
  k[i] = at < ME_DK ? xs[ME_DK + at] : 0.0f;
  qq += q[i] * q[i];
  kk += k[i] * k[i];
}
const float q_by = me_rsqrt(me_sum(qq) + 1e-6f) * ME_SCALE, k_by = me_rsqrt(me_sum(kk) + 1e-6f);
ME_UNROLL for (int i = 0; i < ME_EACH; ++i) {
  q[i] *= q_by;
  k[i] *= k_by;
}
const float rate = me_exp(me_value(ME_DECAY[head])) * me_softplus(ME_A + me_value(ME_SHIFT[head]));
const float stay = me_exp(-rate), beta = 1.0f / (1.0f + me_exp(-(ME_B)));
ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
  const int row = r * ME_WARPS + warp;
  const bool there = row < ME_DV;
  float seen = 0.0f;
  ME_UNROLL for (int i = 0; i < ME_EACH; ++i) {
    kept[r][i] *= stay;
    seen += kept[r][i] * k[i];
  }
  const float by = ((there ? xs[2 * ME_DK + (there ? row : 0)] : 0.0f) - me_sum(seen)) * beta;
  float out = 0.0f;
  ME_UNROLL for (int i = 0; i < ME_EACH; ++i) {
    const int at = i * 32 + lane;
    kept[r][i] += by * k[i];
    out += kept[r][i] * q[i];
    if (there && at < ME_DK) me_set(new_memory + (int64_t(head) * ME_DV + row) * ME_DK + at, kept[r][i]);
  }
  out = me_sum(out);
  if (lane == 0 && there) read[row] = out;
}
me_barrier();
float squares = 0.0f;
for (int i = lane; i < ME_DV; i += 32) squares += read[i] * read[i];
const float by = me_rsqrt(me_sum(squares) / float(ME_DV) + ME_EPS);
for (int i = tid; i < ME_DV; i += ME_WARPS * 32) {
  me_set(y + head * ME_DV + i, read[i] * by * me_value(ME_NORM[i]) * me_open(ME_Z(i)));
}
