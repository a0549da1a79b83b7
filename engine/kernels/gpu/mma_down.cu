// Launch B: ME_TILES * 16 outputs a block; its warps share out the units of all experts. act comes as fragments.
constexpr int rows = ME_TILES * 16, steps = ME_F * ME_WIDE / 128, units = (steps + ME_UNIT - 1) / ME_UNIT;
constexpr int row_bytes = ME_F * ME_WIDE / 2, per_row = ME_F / ME_GROUP, eights = ME_GROUP / 8;
// The shared expert's part of the work follows the experts', with rows of its own length.
constexpr int own_steps = ME_SHARED * ME_WIDE / 128, own_units = (own_steps + ME_UNIT - 1) / ME_UNIT;
constexpr int own_bytes = ME_SHARED * ME_WIDE / 2, own_per_row = ME_SHARED / ME_GROUP;
constexpr int routed = ME_K * units, all = routed + own_units, pairs = ME_K * steps + own_steps;
extern __shared__ uint4 me_shared[];
uint4* const zeros = me_shared + ME_AT_ZEROS + warp * 13;
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
uint4* const ring = me_shared + ME_AT_RING + warp * (ME_STAGES * 32);
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4, h0 = group * rows;

// Lane k knows expert k.
const int expert = indices[lane < ME_K ? lane : 0];
const float score = weights[lane < ME_K ? lane : 0], share = ME_SHARE;
if (lane < 13) zeros[lane] = uint4{0, 0, 0, 0};
const char* const base = reinterpret_cast<const char*>(down_w) + int64_t(h0 + g) * row_bytes + t * 16;
#if ME_SHARED
const char* const own_base = reinterpret_cast<const char*>(shared_down_w) + int64_t(h0 + g) * own_bytes + t * 16;
#endif
const uint4* const fragments = reinterpret_cast<const uint4*>(act) + lane / 16 * (pairs * 16) + lane % 16;
const int first = warp * all / ME_WARPS, count = (warp + 1) * all / ME_WARPS - first;
uint4 hold[ME_UNIT][ME_TILES * 2];
auto is_own = [&](int unit) { return ME_SHARED > 0 && unit >= routed; };
// Where a step of a unit is within its expert, and whether it is there.
auto step_of = [&](int unit, int s) { return (is_own(unit) ? unit - routed : unit % units) * ME_UNIT + s; };
auto is_there = [&](int unit, int s) { return step_of(unit, s) < (is_own(unit) ? own_steps : steps); };
auto ask = [&](int j, int s) {
  const int unit = first + j / ME_UNIT, k = unit / units, step = step_of(unit, s);
  const int64_t e = __shfl_sync(0xffffffffu, expert, k & 31);
  if (j < count * ME_UNIT && is_there(unit, s)) {
    const char* from = base + e * (int64_t(ME_H) * row_bytes) + step * 64;
    int stride = 8 * row_bytes;
#if ME_SHARED
    if (is_own(unit)) from = own_base + step * 64, stride = 8 * own_bytes;
#endif
    ME_UNROLL for (int m = 0; m < ME_TILES * 2; ++m) hold[s][m] = me_stream(from + m * stride);
  }
};
auto ask_act = [&](int j) {
  const int unit = first + j / ME_UNIT, before = is_own(unit) ? ME_K * steps : unit / units * steps;
  if (j < count * ME_UNIT && is_there(unit, j % ME_UNIT)) {
    me_copy(ring + j % ME_STAGES * 32 + lane, fragments + (before + step_of(unit, j % ME_UNIT)) * 16);
  }
  me_commit();
};
ME_UNROLL for (int j = 0; j < ME_UNIT; ++j) ask(j, j);
ME_UNROLL for (int j = 0; j < ME_STAGES; ++j) ask_act(j);

const int column = 2 * t % ME_GROUPS;
me_pairs<ME_SCALE_TYPE> next[ME_TILES][2];
float next_sum = 0.0f;
// Scales of a unit, and this lane's share of the sums of eight that launch A left behind the fragments.
auto fetch = [&](int unit) {
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units;
  const int64_t e = __shfl_sync(0xffffffffu, expert, k & 31);
  const int64_t row = (e * ME_H + h0 + g) * per_row;
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    ME_UNROLL for (int h = 0; h < 2; ++h) {
      const int64_t its = row + (m * 16 + h * 8) * per_row;
#if ME_SHARED
      if (own) {
        const int64_t at = int64_t(h0 + g + m * 16 + h * 8) * own_per_row;
        next[m][h] = me_pairs_at<own_per_row>(shared_down_s + at, shared_down_b + at, u * ME_GROUPS + column);
        continue;
      }
#endif
      next[m][h] = me_pairs_at<per_row>(down_s + its, down_b + its, u * ME_GROUPS + column);
    }
  }
  const int i = u * (ME_GROUPS * eights) + lane;
  const bool there = lane < ME_GROUPS * eights && i < (own ? ME_SHARED : ME_F) / 8;
  next_sum = there ? act[pairs * 128 + k * (ME_F / 8) + i] : 0.0f;
};
if (count > 0) fetch(first);
__syncwarp();

float total[ME_TILES][2];
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) total[m][0] = total[m][1] = 0.0f;
const int mine = (g >= ME_GROUPS ? 16 : 0) + t;
for (int i = 0; i < count; ++i) {
  const int unit = first + i;
  me_pairs<ME_SCALE_TYPE> now[ME_TILES][2];
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) now[m][0] = next[m][0], now[m][1] = next[m][1];
  float sum = next_sum;
  if (i + 1 < count) fetch(unit + 1);
  float c[ME_TILES][4], d[ME_TILES][4];
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    ME_UNROLL for (int n = 0; n < 4; ++n) c[m][n] = d[m][n] = 0.0f;
  }
  ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
    const int j = i * ME_UNIT + s;
    me_wait<ME_STAGES - 1>();
    __syncwarp();
    if ((steps % ME_UNIT == 0 && own_steps % ME_UNIT == 0) || is_there(unit, s)) {
      const uint4* const x = me_feeds(lane, s, 2) ? ring + j % ME_STAGES * 32 + mine : zeros;
      ME_UNROLL for (int m = 0; m < ME_TILES; ++m) me_step(hold[s][2 * m], hold[s][2 * m + 1], x, c[m], d[m]);
    }
    __syncwarp();
    ask(j + ME_UNIT, s);
    ask_act(j + ME_STAGES);
  }
  ME_UNROLL for (int n = 1; n < eights; n *= 2) sum += me_swap(sum, n);
  const float group0 = __shfl_sync(0xffffffffu, sum, column * eights);
  const float group1 = __shfl_sync(0xffffffffu, sum, (column + 1) * eights & 31);
  const float sum0 = 2 * t < ME_GROUPS ? group0 : 0.0f, sum1 = 2 * t < ME_GROUPS ? group1 : 0.0f;
  const float its_score = __shfl_sync(0xffffffffu, score, unit / units & 31);
  const float by = is_own(unit) ? share : its_score;
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    total[m][0] += by * me_fold(now[m][0], c[m][0] + d[m][0], c[m][1] + d[m][1], sum0, sum1);
    total[m][1] += by * me_fold(now[m][1], c[m][2] + d[m][2], c[m][3] + d[m][3], sum0, sum1);
  }
}
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
  ME_UNROLL for (int h = 0; h < 2; ++h) {
    float v = total[m][h];
    v += me_swap(v, 1);
    v += me_swap(v, 2);
    if (t == 0) red[warp * rows + m * 16 + h * 8 + g] = v;
  }
}
__syncthreads();
if (tid < rows) {
  float sum = 0.0f;
  ME_UNROLL for (int w = 0; w < ME_WARPS; ++w) sum += red[w * rows + tid];
  const int row = h0 + tid;
  ME_ADD_BIAS
  me_set(y + row, sum);
}
