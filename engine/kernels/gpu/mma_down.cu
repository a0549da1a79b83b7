// Launch B: ME_TILES * 16 outputs a block; its warps share out the units of all experts. act comes as fragments.
constexpr int rows = ME_TILES * 16, chunks = ME_F * ME_WIDE / 32, steps = (chunks + 3) / 4;
constexpr int units = (steps + ME_UNIT - 1) / ME_UNIT, row_bytes = chunks * ME_BITS * 4, per_row = ME_PER_ROW;
constexpr int eights = ME_SPAN / ME_WIDE / 8, held = ME_AHEAD * ME_UNIT;
// The shared expert's part of the work follows the experts', with rows of its own length.
constexpr int own_chunks = ME_SHARED * ME_WIDE / 32, own_steps = (own_chunks + 3) / 4;
constexpr int own_units = (own_steps + ME_UNIT - 1) / ME_UNIT, own_bytes = own_chunks * ME_BITS * 4;
constexpr int routed = ME_K * units, all = routed + own_units, pairs = ME_K * steps + own_steps;
extern __shared__ uint4 me_shared[];
uint4* const zeros = me_shared + ME_AT_ZEROS + warp * 13;
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
uint4* const ring = me_shared + ME_AT_RING + warp * (ME_STAGES * 32);
// Neighbouring blocks have the same outputs of every token.
const int token = group % ME_TOKENS, h0 = group / ME_TOKENS * rows;
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4;
indices += token * ME_K;
weights += token * ME_K;
act += int64_t(token) * ME_PITCH;
y += token * ME_H;

// Lane k knows expert k.
const int expert = indices[lane < ME_K ? lane : 0];
const float score = weights[lane < ME_K ? lane : 0] ME_BY_GLOBAL;
if (lane < 13) zeros[lane] = uint4{0, 0, 0, 0};
const char* const base = reinterpret_cast<const char*>(down_w) + int64_t(h0 + g) * row_bytes + t * (ME_BITS * 4);
#if ME_SHARED
const char* const own_base =
    reinterpret_cast<const char*>(shared_down_w) + int64_t(h0 + g) * own_bytes + t * (ME_BITS * 4);
#endif
// A lane copies a fragment of the high parts or of the low ones, of the inputs that chunk lane % 4 of a step has.
const int copied = lane % 4;
const uint4* const fragments = reinterpret_cast<const uint4*>(act) + lane / 16 * (pairs * 16) + lane % 16;
const int first = warp * all / ME_WARPS, count = (warp + 1) * all / ME_WARPS - first;
me_chunk hold[held][ME_TILES * 2];
auto is_own = [&](int unit) { return ME_SHARED > 0 && unit >= routed; };
// Where a step of a unit is within its expert, and whether it is there.
auto step_of = [&](int unit, int s) { return (is_own(unit) ? unit - routed : unit % units) * ME_UNIT + s; };
auto is_there = [&](int unit, int s) { return step_of(unit, s) < (is_own(unit) ? own_steps : steps); };
// Whether chunk number i of a step is within the row.
auto has = [&](int unit, int s, int i) {
  if (chunks % 4 == 0 && own_chunks % 4 == 0) return true;
  return step_of(unit, s) * 4 + i < (is_own(unit) ? own_chunks : chunks);
};
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
auto ask_act = [&](int j) {
  const int unit = first + j / ME_UNIT, before = is_own(unit) ? ME_K * steps : unit / units * steps;
  if (j < count * ME_UNIT && is_there(unit, j % ME_UNIT)) {
    const uint4* const from = fragments + (before + step_of(unit, j % ME_UNIT)) * 16;
    me_copy(ring + j % ME_STAGES * 32 + lane, from, has(unit, j % ME_UNIT, copied));
  }
  me_commit();
};
const int column = 2 * t % ME_GROUPS;
me_scales scales[ME_AHEAD][ME_TILES][2];
float sums[ME_AHEAD];
auto ask_scales = [&](int j, int a) {
  const int unit = first + j;
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units;
  const int64_t e = __shfl_sync(0xffffffffu, expert, k & 31);
  if (j >= count) return;
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    ME_UNROLL for (int h = 0; h < 2; ++h) {
      const int64_t row = h0 + g + m * 16 + h * 8;
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
// This lane's share of the sums of eight that launch A left behind the fragments.
auto ask_sums = [&](int j, int a) {
  const int unit = first + j;
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units;
  const int i = u * (ME_GROUPS * eights) + lane;
  const bool there = j < count && lane < ME_GROUPS * eights && i < (own ? ME_SHARED : ME_F) / 8;
  if (ME_SUMMED) sums[a] = there ? ME_ACT(pairs * 128 + k * (ME_F / 8) + i) : 0.0f;
};
// Nothing above reads act.
ME_ASK
ME_UNROLL for (int j = 0; j < held; ++j) ask(j, j);
ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_scales(a, a);
ME_READY
ME_UNROLL for (int j = 0; j < ME_STAGES; ++j) ask_act(j);
ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_sums(a, a);
const float share = ME_SHARE;
__syncwarp();

float total[ME_TILES][2];
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) total[m][0] = total[m][1] = 0.0f;
const int mine = (g >= ME_GROUPS ? 16 : 0) + t;
for (int ahead = 0; ahead < count; ahead += ME_AHEAD) {
  ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) {
    const int i = ahead + a, unit = first + i;
    if (ME_AHEAD > 1 && i >= count) continue;
    float c[ME_TILES][4], d[ME_TILES][4];
    ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
      ME_UNROLL for (int n = 0; n < 4; ++n) c[m][n] = d[m][n] = 0.0f;
    }
    ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
      const int j = i * ME_UNIT + s, slot = a * ME_UNIT + s;
      me_wait<ME_STAGES - 1>();
      __syncwarp();
      if ((steps % ME_UNIT == 0 && own_steps % ME_UNIT == 0) || is_there(unit, s)) {
        const uint4* const x = me_feeds(lane, s, 2) ? ring + j % ME_STAGES * 32 + mine : zeros;
        ME_UNROLL for (int m = 0; m < ME_TILES; ++m) me_step(hold[slot][2 * m], hold[slot][2 * m + 1], x, c[m], d[m]);
      }
      __syncwarp();
      ask(j + held, slot);
      ask_act(j + ME_STAGES);
    }
    float sum0 = 0.0f, sum1 = 0.0f;
    if (ME_SUMMED) {
      float sum = sums[a];
      ME_UNROLL for (int n = 1; n < eights; n *= 2) sum += me_swap(sum, n);
      const float group0 = __shfl_sync(0xffffffffu, sum, column * eights & 31);
      const float group1 = __shfl_sync(0xffffffffu, sum, (column + 1) * eights & 31);
      if (2 * t < ME_GROUPS) sum0 = group0, sum1 = group1;
    }
    const float its_score = __shfl_sync(0xffffffffu, score, unit / units & 31);
    const float by = is_own(unit) ? share : its_score;
    ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
      ME_UNROLL for (int h = 0; h < 2; ++h) {
        total[m][h] += by * me_fold(scales[a][m][h], c[m][2 * h], d[m][2 * h], c[m][2 * h + 1], d[m][2 * h + 1],
                                    sum0, sum1);
      }
    }
    ask_scales(i + ME_AHEAD, a);
    ask_sums(i + ME_AHEAD, a);
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
  sum *= ME_SUM_BY;
  const int64_t row = h0 + tid;
  ME_ADD_BIAS
  me_set(y + row, sum);
}
