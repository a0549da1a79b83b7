// A row times the rows of several matrices: a warp takes ME_ROWS of them. The row may be the sum of two, weighed by
// the sigmoid of a gate, or normalised: a block keeps x times the norm's weight and its own sum of squares, and the
// root comes last.
ME_GROUP_ARRAY(float, xs, ME_SEGMENT / 32 * 36)
ME_GROUP_ARRAY(float, red, ME_WARPS)
const int tid = warp * 32 + lane, tile = group * ME_WARPS + warp;
ME_ASK
float total[ME_ROWS];
ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) total[r] = 0.0f;
float squares = 0.0f;
for (int begin = 0; begin < ME_H; begin += ME_SEGMENT) {
  if (begin > 0) me_barrier();
  for (int i = tid * 8; i < ME_SEGMENT && begin + i < ME_H; i += ME_WARPS * 256) {
    float v[8];
    me_load<8>(x + begin + i, v);
#if ME_ADDED
    float more[8];
    me_load<8>(branch + begin + i, more);
    ME_UNROLL for (int j = 0; j < 8; ++j) {
      v[j] += ME_ADD_SCALE * more[j];
      if (group == 0) me_set(stream + begin + i + j, v[j]);
    }
#endif
#if ME_GATED
    ME_UNROLL for (int j = 0; j < 8; ++j) v[j] *= me_open(me_value(gate[(begin + i + j) / ME_GATE_WIDTH]));
#endif
#if ME_NORM
    ME_UNROLL for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
#if ME_NORM_WEIGHT
    float scale[8];
    me_load<8>(ME_NORM_W + begin + i, scale);
    ME_UNROLL for (int j = 0; j < 8; ++j) v[j] *= scale[j] + ME_NORM_OFFSET;
#endif
#endif
    ME_UNROLL for (int j = 0; j < 8; ++j) xs[me_staged(i) + j] = v[j];
  }
#if ME_NORM
  const float part = me_sum(squares);
  if (lane == 0) red[warp] = part;
#endif
  me_barrier();
  ME_PRODUCTS
}
float factor = 1.0f;
#if ME_NORM
float all = 0.0f;
ME_UNROLL for (int i = 0; i < ME_WARPS; ++i) all += red[i];
factor = me_rsqrt(all / float(ME_H) + ME_EPS);
#endif
// Lane r keeps row r.
float v = 0.0f;
ME_UNROLL for (int r = 0; r < ME_ROWS; ++r) {
  const float sum = me_sum(total[r]);
  if (lane == r) v = sum * factor;
}
