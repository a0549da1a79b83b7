// Launch B: ME_TILES * 16 outputs a block; its warps share out the (expert, step) pairs. act comes as fragments.
constexpr int rows = ME_TILES * 16, steps = ME_F * ME_WIDE / 128, row_bytes = ME_F * ME_WIDE / 2;
constexpr int per_row = ME_F / ME_GROUP, pairs = ME_K * steps, stage = ME_TILES * 64 + 32;
extern __shared__ uint4 me_shared[];
auto* const sums = reinterpret_cast<float*>(me_shared + ME_AT_SUMS);
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
uint4* const scales = me_shared + ME_AT_SCALES;
uint4* const ring = me_shared + ME_AT_RING + warp * (ME_STAGES * stage);
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4, h0 = group * rows;

// Lane k knows expert k.
const int expert = indices[lane < ME_K ? lane : 0];
const float score = weights[lane < ME_K ? lane : 0];
const char* const base = reinterpret_cast<const char*>(down_w) + int64_t(h0 + g) * row_bytes + t * 16;
const uint4* const fragments = reinterpret_cast<const uint4*>(act) + lane / 16 * (pairs * 16) + lane % 16;
const int first = warp * pairs / ME_WARPS, count = (warp + 1) * pairs / ME_WARPS - first;
auto ask = [&](int i) {
  if (i < count) {
    uint4* const slot = ring + i % ME_STAGES * stage + lane;
    const int pair = first + i;
    const int64_t e = __shfl_sync(0xffffffffu, expert, pair / steps);
    const char* const from = base + e * (int64_t(ME_H) * row_bytes) + pair % steps * 64;
    ME_UNROLL for (int m = 0; m < ME_TILES * 2; ++m) me_copy(slot + m * 32, from + m * 8 * row_bytes);
    me_copy(slot + ME_TILES * 64, fragments + pair * 16);
  }
  me_commit();
};
// The rows of one expert are one contiguous piece of its scales; they arrive with the first stage.
constexpr int piece = rows / 8 * per_row;
for (int i = tid; i < ME_K * piece; i += ME_WARPS * 32) {
  const int64_t from = (int64_t(indices[i / piece]) * ME_H + h0) * per_row;
  me_copy(scales + i, reinterpret_cast<const uint4*>(down_s + from) + i % piece);
  me_copy(scales + ME_K * piece + i, reinterpret_cast<const uint4*>(down_b + from) + i % piece);
}
ME_UNROLL for (int i = 0; i < ME_STAGES; ++i) ask(i);

// Sums of eight come from launch A, behind the fragments.
constexpr int share = ME_SPAN / ME_WIDE / 8;
const float* const eights = act + pairs * 128;
for (int i = tid; i < pairs * ME_GROUPS; i += ME_WARPS * 32) {
  float sum = 0.0f;
  ME_UNROLL for (int j = 0; j < share; ++j) sum += eights[i * share + j];
  sums[i] = sum;
}

float total[ME_TILES][2];
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) total[m][0] = total[m][1] = 0.0f;
const bool feeds = me_feeds(lane, 2), counts = 2 * t < ME_GROUPS;
const int mine = ME_TILES * 64 + (g >= ME_GROUPS ? 16 : 0) + t;
me_wait<ME_STAGES - 1>();
__syncthreads();
for (int i = 0; i < count; ++i) {
  me_wait<ME_STAGES - 1>();
  __syncwarp();
  const uint4* const slot = ring + i % ME_STAGES * stage;
  const int pair = first + i, k = pair / steps, at_group = pair % steps * 128 / (ME_GROUP * ME_WIDE);
  uint4 f[4];
  ME_UNROLL for (int j = 0; j < 4; ++j) f[j] = feeds ? slot[mine + j * 4] : uint4{0, 0, 0, 0};
  const float sum0 = counts ? sums[pair * ME_GROUPS + t * 2 % ME_GROUPS] : 0.0f;
  const float sum1 = counts && ME_GROUPS > 1 ? sums[pair * ME_GROUPS + t * 2 % ME_GROUPS + 1] : 0.0f;
  const float by = __shfl_sync(0xffffffffu, score, k);
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    me_step(slot[m * 64 + lane], slot[m * 64 + 32 + lane], f, c, d);
    const auto* s = reinterpret_cast<decltype(down_s)>(scales) + (k * rows + m * 16 + g) * per_row + at_group;
    const auto* b = s + ME_K * rows * per_row;
    total[m][0] += by * me_fold(s, b, t, c[0] + d[0], c[1] + d[1], sum0, sum1);
    s += 8 * per_row;
    b += 8 * per_row;
    total[m][1] += by * me_fold(s, b, t, c[2] + d[2], c[3] + d[3], sum0, sum1);
  }
  __syncwarp();
  ask(i + ME_STAGES);
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
