// Launch A: ME_TEAMS tiles of 16 rows a block, each by ME_SPLIT warps that share out its units. A gated tile has
// gate rows in its low half and the same up rows in its high half. After the experts' tiles come the shared
// expert's, then one block for the row that weighs it. A warp has one unit of weights on its way to
// registers: copies to shared memory (cp.async) took twice the L2 traffic and 20 % more time.
constexpr int steps = ME_H * ME_WIDE / 128, units = (steps + ME_UNIT - 1) / ME_UNIT;
constexpr int row_bytes = ME_H * ME_WIDE / 2, per_row = ME_H / ME_GROUP, per_tile = ME_GATED ? 8 : 16;
constexpr int routed = ME_ROUTED / per_tile, tiles = routed + ME_SHARED / per_tile, threads = ME_TEAMS * ME_SPLIT * 32;
constexpr int each = 8 / ME_WIDE, vectors = steps * 16, takes = (vectors + threads - 1) / threads;
extern __shared__ uint4 me_shared[];
uint4* const xs = me_shared + ME_AT_X;
uint4* const zeros = me_shared + ME_AT_ZEROS;
auto* const sums = reinterpret_cast<float*>(me_shared + ME_AT_SUMS);
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4, team = warp / ME_SPLIT, part = warp % ME_SPLIT;

#if ME_WEIGHED
if (group == (tiles + ME_TEAMS - 1) / ME_TEAMS) {
  if (warp == 0) {
    ME_WEIGH
  }
  return;
}
#endif
const int tile = group * ME_TEAMS + team;
const bool own = ME_SHARED > 0 && tile >= routed && tile < tiles;
const int k = tile < routed ? tile / (ME_F / per_tile) : 0;
const int f0 = own ? (tile - routed) * per_tile : tile % (ME_F / per_tile) * per_tile;
const int64_t at = own ? f0 : int64_t(indices[k]) * ME_F + f0;

// x is on its way while the index is.
me_pack<me_uint, each / 2> raw[takes];
float wide[ME_HALVES > 1 ? takes : 1][each];
ME_UNROLL for (int i = 0; i < takes; ++i) {
  const int v = i * threads + tid;
  if (ME_HALVES > 1) {
    if (v < vectors) me_load<each>(x + v * each, wide[ME_HALVES > 1 ? i : 0]);
  } else if (v < vectors) {
    raw[i] = me_raw<each / 2>(x + v * each);
  }
}

const int64_t low_row = at + g, high_row = low_row + (ME_GATED ? (own ? ME_UP_FIRST : 0) : 8);
const char* const low = reinterpret_cast<const char*>(ME_LOW(w)) + low_row * row_bytes + t * 16;
const char* const high = reinterpret_cast<const char*>(ME_HIGH(w)) + high_row * row_bytes + t * 16;
const int first = part * units / ME_SPLIT, count = (part + 1) * units / ME_SPLIT - first;
uint4 hold[ME_UNIT][2];
auto ask = [&](int j, int s) {
  const int step = first * ME_UNIT + j;
  if (j < count * ME_UNIT && step < steps) {
    hold[s][0] = me_stream(low + step * 64);
    hold[s][1] = me_stream(high + step * 64);
  }
};
ME_UNROLL for (int j = 0; j < ME_UNIT; ++j) ask(j, j);
const int column = 2 * t % ME_GROUPS;
const auto* const low_s = ME_LOW(s) + low_row * per_row;
const auto* const low_b = ME_LOW(b) + low_row * per_row;
const auto* const high_s = ME_HIGH(s) + high_row * per_row;
const auto* const high_b = ME_HIGH(b) + high_row * per_row;
auto low_next = me_pairs_at<per_row>(low_s, low_b, first * ME_GROUPS + column);
auto high_next = me_pairs_at<per_row>(high_s, high_b, first * ME_GROUPS + column);

// x as fragments, and its sums over each group.
if (tid < 13) zeros[tid] = uint4{0, 0, 0, 0};
ME_UNROLL for (int i = 0; i < takes; ++i) {
  const int v = i * threads + tid;
  me_uint p[ME_HALVES][each / 2];
  float sum = 0.0f;
  ME_UNROLL for (int n = 0; n < each / 2; ++n) {
    if (ME_HALVES > 1) {
      const me_uint a = me_split(v < vectors ? wide[ME_HALVES > 1 ? i : 0][2 * n] : 0.0f);
      const me_uint b = me_split(v < vectors ? wide[ME_HALVES > 1 ? i : 0][2 * n + 1] : 0.0f);
      p[0][n] = __byte_perm(a, b, 0x5410);
      p[ME_HALVES - 1][n] = __byte_perm(a, b, 0x7632);
    } else {
      p[0][n] = v < vectors ? raw[i].v[n] : 0;
    }
    ME_UNROLL for (int h = 0; h < ME_HALVES; ++h) sum += me_bits(p[h][n] << 16) + me_bits(p[h][n] & 0xFFFF0000u);
  }
  ME_UNROLL for (int d = 1; d < ME_SPAN / 8; d *= 2) sum += me_swap(sum, d);
  if (v < vectors) {
    ME_UNROLL for (int h = 0; h < ME_HALVES; ++h) xs[h * vectors + me_place(v)] = me_fragment(p[h]);
    if (v % (ME_SPAN / 8) == 0) sums[v / (ME_SPAN / 8)] = sum;
  }
}
__syncthreads();

float low_total = 0.0f, high_total = 0.0f;
const bool counts = 2 * t < ME_GROUPS;
const uint4* const mine = xs + (ME_HALVES > 1 && g >= ME_GROUPS ? vectors : 0) + t;
for (int i = 0; i < count; ++i) {
  const auto low_pairs = low_next, high_pairs = high_next;
  if (i + 1 < count) {
    low_next = me_pairs_at<per_row>(low_s, low_b, (first + i + 1) * ME_GROUPS + column);
    high_next = me_pairs_at<per_row>(high_s, high_b, (first + i + 1) * ME_GROUPS + column);
  }
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  ME_UNROLL for (int s = 0; s < ME_UNIT; ++s) {
    const int j = i * ME_UNIT + s, step = first * ME_UNIT + j;
    if (steps % ME_UNIT == 0 || step < steps) {
      me_step(hold[s][0], hold[s][1], me_feeds(lane, s, ME_HALVES) ? mine + step * 16 : zeros, c, d);
    }
    ask(j + ME_UNIT, s);
  }
  const int at_group = (first + i) * ME_GROUPS + column;
  const float sum0 = counts && at_group < per_row ? sums[at_group] : 0.0f;
  const float sum1 = ME_GROUPS > 1 && counts && at_group + 1 < per_row ? sums[at_group + 1] : 0.0f;
  low_total += me_fold(low_pairs, c[0] + d[0], c[1] + d[1], sum0, sum1);
  high_total += me_fold(high_pairs, c[2] + d[2], c[3] + d[3], sum0, sum1);
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
// Whole warps go on, so that the sums of eight can be exchanged.
if (warp * 32 < ME_TEAMS * per_tile) {
  const int r = tid < ME_TEAMS * per_tile ? tid : 0, i = r % per_tile;
  const int its_tile = group * ME_TEAMS + r / per_tile;
  const bool real = tid < ME_TEAMS * per_tile && its_tile < tiles;
  float a = 0.0f, b = 0.0f;
  ME_UNROLL for (int w = 0; w < ME_SPLIT; ++w) {
    const float* const from = red + (r / per_tile * ME_SPLIT + w) * 16 + i;
    a += from[0];
    if (ME_GATED) b += from[8];
  }
  const int place = real ? its_tile * per_tile + i : 0;
  const bool own = ME_SHARED > 0 && place >= ME_ROUTED;
  const int64_t row = own ? place - ME_ROUTED : int64_t(indices[place / ME_F]) * ME_F + place % ME_F;
  const int64_t up_row = own ? row + ME_UP_FIRST : row;
  const float value = ME_GATED ? me_activation(ME_END_GATE(a), ME_END_UP(b)) : me_activation(0.0f, ME_END_UP(a));
#if ME_FRAGMENTS
  me_keep(act, place, value, real);
#else
  if (real) act[place] = value;
#endif
}
