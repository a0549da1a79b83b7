// Launch A: ME_TILES tiles of 16 rows a block, the inputs split over its warps. A gated tile has gate rows in
// its low half and the same up rows in its high half. Every weight is asked for before anything is computed.
constexpr int half = ME_TILES * 8, steps = ME_H * ME_WIDE / 128, row_bytes = ME_H * ME_WIDE / 2;
constexpr int per_row = ME_H / ME_GROUP, per_block = ME_GATED ? half : 2 * half;
extern __shared__ uint4 me_shared[];
uint4* const xs = me_shared + ME_AT_X;
auto* const sums = reinterpret_cast<float*>(me_shared + ME_AT_SUMS);
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
uint4* const scales = me_shared + ME_AT_SCALES;
uint4* const ring = me_shared + ME_AT_RING + warp * (ME_STAGES * ME_TILES * 64) + lane;
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4;

const int k = group / (ME_F / per_block), f0 = group % (ME_F / per_block) * per_block;
const int64_t at = int64_t(indices[k]) * ME_F + f0;
const int64_t at_high = ME_GATED ? at : at + half;
const char* const low = reinterpret_cast<const char*>(ME_LOW(w)) + (at + g) * row_bytes + t * 16;
const char* const high = reinterpret_cast<const char*>(ME_HIGH(w)) + (at_high + g) * row_bytes + t * 16;

const int first = warp * steps / ME_WARPS, count = (warp + 1) * steps / ME_WARPS - first;
auto ask = [&](int i) {
  if (i < count) {
    uint4* const slot = ring + i % ME_STAGES * (ME_TILES * 64);
    ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
      me_copy(slot + m * 64, low + m * 8 * row_bytes + (first + i) * 64);
      me_copy(slot + m * 64 + 32, high + m * 8 * row_bytes + (first + i) * 64);
    }
  }
  me_commit();
};
// Scales and biases of a half are one contiguous piece each; they arrive with the first stage.
constexpr int piece = ME_TILES * per_row;
for (int i = tid; i < piece; i += ME_WARPS * 32) {
  me_copy(scales + i, reinterpret_cast<const uint4*>(ME_LOW(s) + at * per_row) + i);
  me_copy(scales + piece + i, reinterpret_cast<const uint4*>(ME_HIGH(s) + at_high * per_row) + i);
  me_copy(scales + 2 * piece + i, reinterpret_cast<const uint4*>(ME_LOW(b) + at * per_row) + i);
  me_copy(scales + 3 * piece + i, reinterpret_cast<const uint4*>(ME_HIGH(b) + at_high * per_row) + i);
}
ME_UNROLL for (int i = 0; i < ME_STAGES; ++i) ask(i);

// x as fragments, and its sums over each group (or over 128 nibbles of a wider one).
constexpr int each = 8 / ME_WIDE, vectors = steps * 16, share = ME_SPAN / 8;
for (int base = warp * 32; base < vectors; base += ME_WARPS * 32) {
  const int v = base + lane;
  float q[each], sum = 0.0f;
  me_uint s[each];
  if (v < vectors) me_load<each>(x + v * each, q);
  ME_UNROLL for (int i = 0; i < each; ++i) {
    s[i] = me_split(v < vectors ? q[i] : 0.0f);
    sum += me_bits(s[i] << 16) + (ME_HALVES > 1 ? me_bits(s[i] & 0xFFFF0000u) : 0.0f);
  }
  ME_UNROLL for (int d = 1; d < share; d *= 2) sum += me_swap(sum, d);
  if (v < vectors) {
    xs[me_place(v)] = me_fragment(s, false);
    if (ME_HALVES > 1) xs[vectors + me_place(v)] = me_fragment(s, true);
    if (v % share == 0) sums[v / share] = sum;
  }
}

float total[ME_TILES][2];
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) total[m][0] = total[m][1] = 0.0f;
const bool feeds = me_feeds(lane, ME_HALVES), counts = 2 * t < ME_GROUPS;
const uint4* const mine = xs + (g >= ME_GROUPS && ME_HALVES > 1 ? vectors : 0) + t;
me_wait<ME_STAGES - 1>();
__syncthreads();
for (int i = 0; i < count; ++i) {
  me_wait<ME_STAGES - 1>();
  const int step = first + i, at_group = step * 128 / (ME_GROUP * ME_WIDE);
  uint4 f[4];
  ME_UNROLL for (int j = 0; j < 4; ++j) f[j] = feeds ? mine[step * 16 + j * 4] : uint4{0, 0, 0, 0};
  const float sum0 = counts ? sums[step * ME_GROUPS + t * 2 % ME_GROUPS] : 0.0f;
  const float sum1 = counts && ME_GROUPS > 1 ? sums[step * ME_GROUPS + t * 2 % ME_GROUPS + 1] : 0.0f;
  const uint4* const slot = ring + i % ME_STAGES * (ME_TILES * 64);
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    me_step(slot[m * 64], slot[m * 64 + 32], f, c, d);
    const auto* s = reinterpret_cast<decltype(up_s)>(scales) + (m * 8 + g) * per_row + at_group;
    const auto* b = s + 2 * half * per_row;
    total[m][0] += me_fold(s, b, t, c[0] + d[0], c[1] + d[1], sum0, sum1);
    s += half * per_row;
    b += half * per_row;
    total[m][1] += me_fold(s, b, t, c[2] + d[2], c[3] + d[3], sum0, sum1);
  }
  ask(i + ME_STAGES);
}
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
  ME_UNROLL for (int h = 0; h < 2; ++h) {
    float v = total[m][h];
    v += me_swap(v, 1);
    v += me_swap(v, 2);
    if (t == 0) red[warp * (ME_TILES * 16) + m * 16 + h * 8 + g] = v;
  }
}
__syncthreads();
// Whole warps go on, so that the sums of eight can be exchanged.
if (warp * 32 < per_block) {
  const int r = tid < per_block ? tid : 0;
  const int slot = ME_GATED ? r / 8 * 16 + r % 8 : r % half / 8 * 16 + r / half * 8 + r % 8;
  float a = 0.0f, b = 0.0f;
  ME_UNROLL for (int w = 0; w < ME_WARPS; ++w) {
    a += red[w * (ME_TILES * 16) + slot];
    if (ME_GATED) b += red[w * (ME_TILES * 16) + slot + 8];
  }
  const float value = ME_GATED ? me_activation(ME_END_GATE(a), ME_END_UP(b)) : me_activation(0.0f, ME_END_UP(a));
  const int place = k * ME_F + f0 + r;
#if ME_FRAGMENTS
  me_keep(act, place, value, tid < per_block);
#else
  if (tid < per_block) act[place] = value;
#endif
}
