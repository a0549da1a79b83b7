// Each part of a row times a matrix of its own. ME_LANES lanes share a row of a matrix and a warp takes 32 / ME_LANES
// rows at once, so that no lane is idle where a row is short.
ME_GROUP_ARRAY(float, xs, (ME_H + 31) / 32 * 36)
constexpr int chunk = ME_CHUNK, at_once = 32 / ME_LANES;
constexpr int words = ME_H * ME_BITS / 32;
constexpr int groups = ME_GROUP_SIZE == 0 ? 0 : ME_H / (ME_GROUP_SIZE == 0 ? 1 : ME_GROUP_SIZE);
const int tid = warp * 32 + lane, part = lane % ME_LANES, own = lane / ME_LANES;
const int first = (group * ME_WARPS + warp) * ME_PASSES * at_once;
const auto from = x + (group / ME_GROUPS) * ME_PITCH;
for (int i = tid * 8; i < ME_H; i += ME_WARPS * 256) {
  float v[8];
  me_load<8>(from + i, v);
  ME_UNROLL for (int j = 0; j < 8; ++j) xs[i / 32 * 36 + i % 32 + j] = v[j];
}
me_barrier();
float total[ME_PASSES];
ME_UNROLL for (int pass = 0; pass < ME_PASSES; ++pass) total[pass] = 0.0f;
for (int c = part; c < ME_H / chunk; c += ME_LANES) {
  float v[chunk], sum = 0.0f;
  ME_UNROLL for (int j = 0; j < chunk; ++j) sum += v[j] = xs[c * chunk / 32 * 36 + c * chunk % 32 + j];
  ME_UNROLL for (int pass = 0; pass < ME_PASSES; ++pass) {
    const int64_t row = first + pass * at_once + own;
    total[pass] += me_dot<ME_FORMAT, ME_BITS, ME_GROUP_SIZE>(ME_W + row * words, ME_S + row * groups, ME_B + row * groups, c, v, sum);
  }
}
ME_UNROLL for (int pass = 0; pass < ME_PASSES; ++pass) {
  ME_UNROLL for (int d = ME_LANES / 2; d > 0; d /= 2) total[pass] += me_swap(total[pass], d);
  if (part == 0) me_set(y + first + pass * at_once + own, total[pass]);
}
