// ME_WARPS * ME_TILES * 16 rows of one expert's matrix by up to ME_TILE of its tokens a block; the tokens of a step
// of 128 inputs are shared through memory, and each warp decodes its own rows. A gated tile has gate rows in its
// low half and the same up rows in its high half. Neighbouring blocks have the same rows of neighbouring tiles of
// tokens, so that the L2 has an expert's weights for all of its tokens.
constexpr int chunks = ME_COLS / 32, steps = (chunks + 3) / 4, row_bytes = chunks * ME_BITS * 4;
constexpr int per_tile = ME_GATED ? 8 : 16, per_warp = per_tile * ME_TILES, per_block = per_warp * ME_WARPS;
constexpr int threads = ME_WARPS * 32, columns = ME_TILE / 8, pitch = 20, stage = ME_TILE * pitch;
extern __shared__ uint4 me_shared[];
uint4* const ring = me_shared;
auto* const found = reinterpret_cast<int*>(me_shared + ME_STAGES * stage);
const int tid = warp * 32 + lane, g = lane / 4, t = lane % 4;
const int tiles = int(gridDim.x) / ME_ROW_BLOCKS, tile = group % tiles, row0 = group / tiles * per_block + warp * per_warp;

// Expert e has the tiles from starts[e] / ME_TILE + e on; some numbers are nobody's.
if (tid == 0) found[0] = -1;
__syncthreads();
for (int e = tid; e < ME_E; e += threads) {
  const int begin = starts[e], count = starts[e + 1] - begin, local = tile - (begin / ME_TILE + e);
  if (local >= 0 && local * ME_TILE < count) found[0] = e;
}
__syncthreads();
const int expert = found[0];
if (expert < 0) return;
const int64_t e = expert;
const int begin = starts[expert], first = begin + (tile - (begin / ME_TILE + expert)) * ME_TILE;
const int left = starts[expert + 1] - first, count = left < ME_TILE ? left : ME_TILE;

const uint4* const tokens = reinterpret_cast<const uint4*>(rows) + int64_t(first) * (steps * 16);
auto ask_tokens = [&](int step) {
  if (step < steps) {
    ME_UNROLL for (int i = 0; i < ME_TILE * 16 / threads; ++i) {
      const int n = (i * threads + tid) / 16, v = tid % 16;
      const bool there = n < count && step * 4 + v % 4 < chunks;
      me_copy(ring + step % ME_STAGES * stage + n * pitch + v, tokens + (there ? n * (steps * 16) + step * 16 + v : 0),
              there);
    }
  }
  me_commit();
};

me_chunk hold[ME_TILES][2];
me_line lines[ME_TILES][2];
auto ask = [&](int step) {
  const int chunk = step * 4 + t;
  const bool there = step < steps && (chunks % 4 == 0 || chunk < chunks);
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    const int low = row0 + m * per_tile + g, high = low + (ME_GATED ? 0 : 8);
    const int64_t low_row = e * ME_ROWS + (low < ME_ROWS ? low : 0), high_row = e * ME_ROWS + (high < ME_ROWS ? high : 0);
    hold[m][0] = me_take(reinterpret_cast<const char*>(ME_LOW(w)) + low_row * row_bytes + chunk * (ME_BITS * 4), there);
    hold[m][1] =
        me_take(reinterpret_cast<const char*>(ME_HIGH(w)) + high_row * row_bytes + chunk * (ME_BITS * 4), there);
    const int at = there ? chunk * 32 / ME_GROUP_SIZE : 0;
    lines[m][0] = ME_LOW_LINE(low_row * ME_PER_ROW + at);
    lines[m][1] = ME_HIGH_LINE(high_row * ME_PER_ROW + at);
  }
};
ask(0);
ME_UNROLL for (int s = 0; s < ME_STAGES - 1; ++s) ask_tokens(s);

float c[ME_TILES][columns][4];
ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
  ME_UNROLL for (int n = 0; n < columns; ++n) {
    ME_UNROLL for (int i = 0; i < 4; ++i) c[m][n][i] = 0.0f;
  }
}
for (int step = 0; step < steps; ++step) {
  me_wait<ME_STAGES - 2>();
  __syncthreads();
  ask_tokens(step + ME_STAGES - 1);
  me_chunk now[ME_TILES][2];
  me_line its[ME_TILES][2];
  ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
    ME_UNROLL for (int h = 0; h < 2; ++h) now[m][h] = hold[m][h], its[m][h] = lines[m][h];
  }
  ask(step + 1);
  const uint4* const x = ring + step % ME_STAGES * stage + g * pitch + t;
  ME_UNROLL for (int j = 0; j < 4; ++j) {
    me_uint a[ME_TILES][2][4];
    ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
      ME_UNROLL for (int h = 0; h < 2; ++h) {
        ME_UNROLL for (int i = 0; i < 4; ++i) a[m][h][i] = me_weights(now[m][h], its[m][h], j, i);
      }
    }
    ME_UNROLL for (int n = 0; n < columns; ++n) {
      if (n * 8 < count) {
        const uint4 f = x[n * 8 * pitch + j * 4];
        ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
          me_mma(c[m][n], a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1], f.x, f.y);
          me_mma(c[m][n], a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3], f.z, f.w);
        }
      }
    }
  }
}

ME_UNROLL for (int m = 0; m < ME_TILES; ++m) {
  ME_UNROLL for (int n = 0; n < columns; ++n) {
    ME_UNROLL for (int i = 0; i < 2; ++i) {
      const int token = n * 8 + t * 2 + i, low = row0 + m * per_tile + g;
      if (token >= count) continue;
#if ME_GATED
      if (low < ME_ROWS) {
        const int64_t row = e * ME_ROWS + low, up_row = row;
        ME_KEEP(first + token, low, me_activation(ME_END_GATE(c[m][n][i]), ME_END_UP(c[m][n][2 + i])));
      }
#else
      ME_UNROLL for (int h = 0; h < 2; ++h) {
        if (low + h * 8 < ME_ROWS) {
          const int64_t up_row = e * ME_ROWS + low + h * 8;
          ME_KEEP(first + token, low + h * 8, ME_END(ME_END_UP(c[m][n][h * 2 + i])));
        }
      }
#endif
    }
  }
}
