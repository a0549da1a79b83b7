// Launch B: ME_TILES * 16 outputs a block; its warps share out the units of all experts.
constexpr int rows = ME_TILES * 16, chunks = ME_F * ME_WIDE / 32, steps = (chunks + 3) / 4;
constexpr int units = (steps + ME_UNIT - 1) / ME_UNIT, row_bytes = chunks * ME_BITS * 4, per_row = ME_PER_ROW;
constexpr int held = ME_AHEAD * ME_UNIT;
// The shared expert's part of the work follows the experts', with rows of its own length.
constexpr int own_chunks = ME_SHARED * ME_WIDE / 32, own_steps = (own_chunks + 3) / 4;
constexpr int own_units = (own_steps + ME_UNIT - 1) / ME_UNIT, own_bytes = own_chunks * ME_BITS * 4;
constexpr int routed = ME_K * units, all = routed + own_units, pairs = ME_K * steps + own_steps;
extern __shared__ uint4 me_shared[];
uint4* const zeros = me_shared + ME_AT_ZEROS + warp * 13;
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
uint4* const ring = me_shared + ME_AT_RING + warp * ME_RING;
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
const int first = warp * all / ME_WARPS;
const int count = all % ME_WARPS ? (warp + 1) * all / ME_WARPS - first : all / ME_WARPS;
auto is_own = [&](int unit) { return ME_SHARED > 0 && unit >= routed; };
// Where a step of a unit is within its expert, and whether it is there.
auto step_of = [&](int unit, int s) { return (is_own(unit) ? unit - routed : unit % units) * ME_UNIT + s; };
auto is_there = [&](int unit, int s) { return step_of(unit, s) < (is_own(unit) ? own_steps : steps); };
// Whether chunk number i of a step is within the row.
auto has = [&](int unit, int s, int i) {
  if (chunks % 4 == 0 && own_chunks % 4 == 0) return true;
  return step_of(unit, s) * 4 + i < (is_own(unit) ? own_chunks : chunks);
};
const int column = 2 * t % ME_GROUPS;
ME_DOWN_WEIGHTS
ME_DOWN_ACT
// Nothing above reads act.
ME_ASK_WEIGHTS
ask_first();
const float share = ME_SHARE;
__syncwarp();

float total[ME_TILES][2];
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) total[m][0] = total[m][1] = 0.0f;
for (int ahead = 0; ahead < count; ahead += ME_AHEAD) {
  ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) {
    const int i = ahead + a, unit = first + i;
    if (ME_AHEAD > 1 && i >= count) continue;
    me_acc c[ME_TILES][4], d[ME_TILES][4];
    ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
      ME_UNROLL for (int n = 0; n < 4; ++n) c[m][n] = d[m][n] = 0;
    }
    begin_unit(a);
    arrived(unit);
    ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
      const int j = i * ME_UNIT + s, slot = a * ME_UNIT + s;
      begin_step();
      if ((steps % ME_UNIT == 0 && own_steps % ME_UNIT == 0) || is_there(unit, s)) {
        const uint4* const x = me_feeds(lane, s) ? inputs_at(j, s) : zeros;
        ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
          me_step(chunk_of(j, slot, 2 * m), chunk_of(j, slot, 2 * m + 1), x, c[m], d[m]);
        }
      }
      end_step(j);
      ask(j + held, slot);
    }
    const me_inputs in = end_unit(i, a);
    const float its_score = __shfl_sync(0xffffffffu, score, unit / units & 31);
    const float by = is_own(unit) ? share : its_score;
    ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
      ME_UNROLL for (int h = 0; h < 2; ++h) {
        total[m][h] +=
            by * me_fold(scales_of(i, a, m, h), c[m][2 * h], d[m][2 * h], c[m][2 * h + 1], d[m][2 * h + 1], in);
      }
    }
    ask_scales(i + ME_AHEAD, a);
  }
}
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
  ME_UNROLL for (int h = 0; h < 2; ++h) {
    float v = total[m][h];
    v += me_swap(v, 1);
    v += me_swap(v, 2);
    if (t == 0) red[warp * rows + row_of(m, h)] = v;
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
