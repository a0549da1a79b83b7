// Launch A: ME_TEAMS tiles of 16 rows a block, each by ME_SPLIT warps that share out its units. A gated tile has
// gate rows in its low half and the same up rows in its high half. After the experts' tiles come the shared
// expert's, then one block for the row that weighs it. A warp has ME_AHEAD units of weights on their way to
// registers: copies to shared memory (cp.async) took twice the L2 traffic and 20 % more time.
constexpr int chunks = ME_H * ME_WIDE / 32, steps = (chunks + 3) / 4, units = (steps + ME_UNIT - 1) / ME_UNIT;
constexpr int row_bytes = chunks * ME_BITS * 4, per_row = ME_PER_ROW, per_tile = ME_GATED ? 8 : 16;
constexpr int threads = ME_TEAMS * ME_SPLIT * 32, each = 8 / ME_WIDE, vectors = steps * 16, real = chunks * 4;
constexpr int takes = (vectors + threads - 1) / threads, held = ME_AHEAD * ME_UNIT;
// Tiles of an expert, and blocks of as many tiles as a block has.
constexpr int tiles = ME_F / per_tile, own_tiles = ME_SHARED / per_tile;
constexpr int blocks = (tiles + ME_TEAMS - 1) / ME_TEAMS, own_blocks = (own_tiles + ME_TEAMS - 1) / ME_TEAMS;
extern __shared__ uint4 me_shared[];
uint4* const xs = me_shared + ME_AT_X;
uint4* const zeros = me_shared + ME_AT_ZEROS;
auto* const sums = reinterpret_cast<me_group*>(me_shared + ME_AT_SUMS);
auto* const red = reinterpret_cast<float*>(me_shared + ME_AT_RED);
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4, team = warp / ME_SPLIT, part = warp % ME_SPLIT;

// Neighbouring blocks have the same tiles of every token's experts: where tokens share one, the L2 has it.
const int pairs = ME_TOKENS * ME_K, routed = blocks * pairs;
const bool own = ME_SHARED > 0 && group >= routed;
const int rest = group - routed;
const int token = own ? rest % ME_TOKENS : group % pairs / ME_K, k = own ? ME_K : group % pairs % ME_K;
const int tile0 = (own ? rest / ME_TOKENS : group / pairs) * ME_TEAMS;
x += token * ME_H;
act += int64_t(token) * ME_PITCH;
#if ME_WEIGHED
if (own && rest / ME_TOKENS == own_blocks) {
  if (warp == 0) {
    ME_WEIGH
  }
  return;
}
#endif
const int64_t e = own ? 0 : indices[token * ME_K + k];
const int f0 = (tile0 + team < (own ? own_tiles : tiles) ? tile0 + team : 0) * per_tile;

ME_TILE_X_ASK

const int64_t low_row = e * ME_F + f0 + g, high_row = low_row + (ME_GATED ? (own ? ME_UP_FIRST : 0) : 8);
const char* const low = reinterpret_cast<const char*>(ME_LOW(w)) + low_row * row_bytes + t * (ME_BITS * 4);
const char* const high = reinterpret_cast<const char*>(ME_HIGH(w)) + high_row * row_bytes + t * (ME_BITS * 4);
const int first = part * units / ME_SPLIT;
const int count = units % ME_SPLIT ? (part + 1) * units / ME_SPLIT - first : units / ME_SPLIT;
ME_TILE_ASK

if (tid < 13) zeros[tid] = uint4{0, 0, 0, 0};
ME_TILE_X
__syncthreads();

ME_TILE_SUM
ME_NEXT_PHASE
// Whole warps go on, so that the sums of eight can be exchanged.
if (warp * 32 < ME_TEAMS * per_tile) {
  const int r = tid < ME_TEAMS * per_tile ? tid : 0, f = tile0 * per_tile + r;
  const bool real = tid < ME_TEAMS * per_tile && f < (own ? ME_SHARED : ME_F);
  float a = 0.0f, b = 0.0f;
  ME_UNROLL for (int w = 0; w < ME_SPLIT; ++w) {
    const float* const from = red + (r / per_tile * ME_SPLIT + w) * 16 + r % per_tile;
    a += from[0];
    if (ME_GATED) b += from[8];
  }
  a *= ME_SUM_BY;
  b *= ME_SUM_BY;
  const int64_t row = e * ME_F + (real ? f : 0), up_row = own ? row + ME_UP_FIRST : row;
  const float value = ME_GATED ? me_activation(ME_END_GATE(a), ME_END_UP(b)) : me_activation(0.0f, ME_END_UP(a));
#if ME_FRAGMENTS
  me_keep(act, k * ME_EXPERT_STEPS, f, k * ME_F + f, value, real);
#else
  if (real) ME_LEAVE(k * ME_F + f, value);
#endif
}
