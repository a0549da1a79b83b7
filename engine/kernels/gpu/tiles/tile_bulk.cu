// A tile's weights and scales on their way to shared memory. The last warps ask, one for each tile: who asks for so
// much waits for the copy engine, while the first warps make x ready. Rows 0 to 3 and 4 to 7 of each half are copied
// apart: a lane's row is one of the first four where its g is even.
constexpr int scale_bytes = 8 * per_row * int(sizeof(ME_SCALE_TYPE)), scaled = per_row > 0 ? 1 + ME_SUMMED : 0;
auto* const fulls = reinterpret_cast<uint64_t*>(me_shared + ME_AT_FULL);
char* const nears = reinterpret_cast<char*>(me_shared + ME_AT_TILES);
const int asked = ME_TEAMS * ME_SPLIT - 1 - warp;
if (asked < ME_TEAMS) {
  char* const near = nears + asked * ME_TILE_BYTES;
  uint64_t* const full = fulls + asked;
  const int f = (tile0 + asked < (own ? own_tiles : tiles) ? tile0 + asked : 0) * per_tile;
  const int64_t low0 = e * ME_F + f, high0 = low0 + (ME_GATED ? (own ? ME_UP_FIRST : 0) : 8);
  if (lane == 0) {
    ME_FULL_BEGIN
    me_full_expect(full, 16 * row_bytes + 2 * scaled * scale_bytes);
  }
  __syncwarp();
  if (lane < 4) {
    const char* const rows = lane < 2 ? reinterpret_cast<const char*>(ME_LOW(w)) + low0 * row_bytes
                                      : reinterpret_cast<const char*>(ME_HIGH(w)) + high0 * row_bytes;
    me_full_copy(near + lane * ME_APART, rows + lane % 2 * (4 * row_bytes), 4 * row_bytes, full);
  } else if (lane < 4 + 2 * scaled) {
    const int n = lane - 4;
    const int64_t row = n >= scaled ? high0 : low0;
    const void* from = nullptr;
    ME_SCALES_FROM
    me_full_copy(near + 4 * ME_APART + n * scale_bytes, from, scale_bytes, full);
  }
}
uint64_t* const full = fulls + team;
const char* const near = nears + team * ME_TILE_BYTES;
const char* const near_scales = near + 4 * ME_APART;
// The row of eight that this lane has.
const int mine8 = g / 2 + g % 2 * 4;
auto arrived = [&] {
  me_full_wait(full, ME_PHASE);
  ME_MEANWHILE
};
const int column = 2 * t % ME_GROUPS;
auto chunk_of = [&](int j, int, int half) {
  const int step = first * ME_UNIT + j;
  const char* const row = near + (half * 2 + g % 2) * ME_APART + g / 2 * row_bytes;
  return me_take_near(row + step * (ME_BITS * 16) + t * (ME_BITS * 4), chunks % 4 == 0 || step * 4 + t < chunks);
};
auto scales_of = [&](int i, int, int half) {
  const auto* const s = reinterpret_cast<const ME_SCALE_TYPE*>(near_scales + half * scaled * scale_bytes);
  const auto* const b = s + 8 * per_row;
  (void)b;
  return ME_NEAR_SCALES(mine8 * per_row, (first + i) * ME_GROUPS + column);
};
auto ask = [&](int, int) {};
auto ask_scales = [&](int, int) {};
