// A block a (token, expert) pair, in the order of experts: its token as fragments (codes i and i + 4 of every
// eight side by side, vectors as me_place puts them), and where the pair lies in that order. The last blocks find
// where each expert's pairs begin.
const int tid = warp * 32 + lane, threads = ME_WARPS * 32, pairs = int(gridDim.x) - ME_START_BLOCKS;
if (group >= pairs) {
  const me_uint e = (group - pairs) * threads + tid;
  if (e <= ME_E) {
    int low = 0, high = pairs;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (experts[middle] < e) low = middle + 1; else high = middle;
    }
    starts[e] = low;
  }
  return;
}
const int pair = order[group];
const auto* const from = x + int64_t(pair / ME_K) * ME_H;
auto* const to = reinterpret_cast<uint4*>(rows) + int64_t(group) * (ME_STEPS * 16);
if (tid == 0) places[pair] = group;
for (int v = tid; v < ME_H / 8; v += threads) to[me_place(v)] = me_fragment(me_raw<4>(from + v * 8).v);
