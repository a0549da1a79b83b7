// Waits until every item is marked, and returns -1; or, once it has waited long, an item that is not. Blocks that do
// not run yet (another kernel has their place) are so never waited for.
ME_INLINE int me_next(const me_uint* state, int items, int group, int warp, int lane, int* said) {
  if (warp == 0) {
    const int words = (items + 31) / 32, last = items % 32;
    const me_uint all = lane < words ? (lane == words - 1 && last ? (1u << last) - 1u : ~0u) : 0u;
    me_uint left = all;
    int lanes = 0;
    for (int n = 0; n < ME_PATIENCE; ++n) {
      if (left) left = all & ~me_marks(state + lane);
      lanes = left ? int(1u << lane) : 0;
      ME_UNROLL for (int d = 16; d > 0; d /= 2) lanes |= me_swap(lanes, d);
      if (!lanes) break;
    }
    // Blocks begin to look at different places, so that few do the same.
    int item = -1;
    for (int i = 0; lanes && item < 0 && i < 32; ++i) {
      const int who = (group + i) % 32;
      const int word = __shfl_sync(0xffffffffu, int(left), who);
      if (!(me_uint(lanes) >> who & 1u)) continue;
      for (int j = 0; item < 0 && j < 32; ++j) {
        const int bit = (group / 32 + j) % 32;
        if (me_uint(word) >> bit & 1u) item = who * 32 + bit;
      }
    }
    if (lane == 0) *said = item;
  }
  __syncthreads();
  return *said;
}
