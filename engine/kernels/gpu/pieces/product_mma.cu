// A row times the rows of several matrices on tensor cores: ME_TEAMS tiles of 16 rows a block, each by ME_SPLIT warps
// that share out its units. As in product.h the row may be a sum, gated or normalised; a block keeps x times the
// norm's weight as fragments, in ME_HALVES parts, and the norm's factor comes last. Legend as in chunk.cu.
constexpr int chunks = ME_H * ME_WIDE / 32, steps = (chunks + 3) / 4, units = (steps + ME_UNIT - 1) / ME_UNIT;
constexpr int row_bytes = chunks * ME_BITS * 4, per_row = ME_PER_ROW;
constexpr int threads = ME_TEAMS * ME_SPLIT * 32, each = 8 / ME_WIDE, vectors = steps * 16, real = chunks * 4;
constexpr int takes = (vectors + threads - 1) / threads, early = takes < ME_EARLY ? takes : ME_EARLY;
constexpr int held = ME_AHEAD * ME_UNIT;
extern __shared__ uint4 me_shared[];
uint4* const xs = me_shared + ME_AT_X;
uint4* const zeros = me_shared + ME_AT_ZEROS;
auto* const sums = reinterpret_cast<float*>(me_shared + ME_AT_SUMS);
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
auto* const norms = reinterpret_cast<float*>(me_shared + ME_AT_NORMS);
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4, team = warp / ME_SPLIT, part = warp % ME_SPLIT;

// The row's first vectors are on their way before the weights are, and the weights while it is made to fragments.
decltype(me_held<each>(x)) raw[early];
#if ME_ADDED
decltype(me_held<each>(branch)) raw_branch[early];
#endif
#if ME_NORM_WEIGHT
decltype(me_held<each>(ME_NORM_W)) raw_scale[early];
#endif
ME_UNROLL for (int i = 0; i < early; ++i) {
  const int v = i * threads + tid;
  if (v < real) {
    raw[i] = me_held<each>(x + v * each);
#if ME_ADDED
    raw_branch[i] = me_held<each>(branch + v * each);
#endif
#if ME_NORM_WEIGHT
    raw_scale[i] = me_held<each>(ME_NORM_W + v * each);
#endif
  }
}

// The block's matrix from its first row on, its last row, and the first tile's first row.
const me_uint* matrix = nullptr;
const ME_SCALE_TYPE *matrix_scales = nullptr, *matrix_biases = nullptr;
int last = 0, row0 = 0;
ME_MATRIX
row0 += team * 16;
const int64_t low_row = min(row0 + g, last), high_row = min(row0 + g + 8, last);
const char* const low = reinterpret_cast<const char*>(matrix) + low_row * row_bytes + t * (ME_BITS * 4);
const char* const high = reinterpret_cast<const char*>(matrix) + high_row * row_bytes + t * (ME_BITS * 4);
const int first = part * units / ME_SPLIT, count = row0 > last ? 0 : (part + 1) * units / ME_SPLIT - first;
ME_TILE_ASK

if (tid < 13) zeros[tid] = uint4{0, 0, 0, 0};
float squares = 0.0f;
// Vector v of the row, its values already made ready: as fragments, with the sums over each group.
auto stage = [&](int v, float(&in)[each]) {
#if ME_NORM && !ME_NORM_WEIGHT
  ME_UNROLL for (int n = 0; n < each; ++n) squares += in[n] * in[n];
#endif
  me_uint p[ME_HALVES][each / 2];
  float sum = 0.0f;
  ME_UNROLL for (int n = 0; n < each / 2; ++n) {
    const me_uint a = me_split(ME_X_BY * in[2 * n]), b = me_split(ME_X_BY * in[2 * n + 1]);
    p[0][n] = __byte_perm(a, b, 0x5410);
    if (ME_HALVES > 1) p[ME_HALVES - 1][n] = __byte_perm(a, b, 0x7632);
    ME_UNROLL for (int h = 0; h < ME_HALVES; ++h) sum += me_bits(p[h][n] << 16) + me_bits(p[h][n] & 0xFFFF0000u);
  }
  if (ME_SUMMED) {
    ME_UNROLL for (int d = 1; d < ME_SPAN / 8; d *= 2) sum += me_swap(sum, d);
  }
  if (v < vectors) {
    ME_UNROLL for (int h = 0; h < ME_HALVES; ++h) xs[h * vectors + me_place(v)] = me_fragment(p[h]);
    if (ME_SUMMED && v < real && v % (ME_SPAN / 8) == 0) sums[v / (ME_SPAN / 8)] = sum;
  }
};
auto ready = [&](int v, int i) {
  float in[each];
  const bool there = v < real, now = i >= early;
  const auto own = there && now ? me_held<each>(x + v * each) : raw[now ? 0 : i];
  ME_UNROLL for (int n = 0; n < each; ++n) in[n] = there ? me_value(own.v[n]) : 0.0f;
#if ME_ADDED
  const auto more = there && now ? me_held<each>(branch + v * each) : raw_branch[now ? 0 : i];
  ME_UNROLL for (int n = 0; n < each; ++n) {
    if (there) in[n] += ME_ADD_SCALE * me_value(more.v[n]);
    if (there && group == 0) me_set(stream + v * each + n, in[n]);
  }
#endif
#if ME_GATED
  ME_UNROLL for (int n = 0; n < each; ++n) {
    if (there) in[n] *= me_open(me_value(gate[(v * each + n) / ME_GATE_WIDTH]));
  }
#endif
#if ME_NORM_WEIGHT
  const auto scale = there && now ? me_held<each>(ME_NORM_W + v * each) : raw_scale[now ? 0 : i];
  ME_UNROLL for (int n = 0; n < each; ++n) {
    squares += in[n] * in[n];
    if (there) in[n] *= me_value(scale.v[n]) + ME_NORM_OFFSET;
  }
#endif
  stage(v, in);
};
ME_UNROLL for (int i = 0; i < early; ++i) ready(i * threads + tid, i);
ME_UNROLL_BY(2) for (int i = early; i < takes; ++i) ready(i * threads + tid, early);
#if ME_NORM
const float its_squares = me_sum(squares);
if (lane == 0) norms[warp] = its_squares;
#endif
__syncthreads();

ME_TILE_SUM
float factor = 1.0f;
#if ME_NORM
float all = 0.0f;
ME_UNROLL for (int i = 0; i < ME_TEAMS * ME_SPLIT; ++i) all += norms[i];
factor = me_rsqrt(all / float(ME_H) + ME_EPS);
#endif
// The first warps take a tile each; lane r keeps row r.
const int tile = group * ME_TEAMS + warp;
float v = 0.0f;
if (warp < ME_TEAMS && lane < 16) {
  ME_UNROLL for (int w = 0; w < ME_SPLIT; ++w) v += red[(warp * ME_SPLIT + w) * 16 + lane];
  v *= ME_SUM_BY * factor;
}
