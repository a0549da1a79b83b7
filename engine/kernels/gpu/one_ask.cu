// Launch A's part, and then launch B's weights, which are on their way while other blocks still compute act. The mark
// comes first: its thread waits for all that it has asked for.
ME_GROUP_ARRAY(int, said, 1)
int item = group;
do {
  if (item < ME_ITEMS) {
    up_item(item);
    me_mark(state, item, tid);
  }
  if (group < ME_DOWN_BLOCKS) {
    ME_UNROLL for (int s = 0; s < held; ++s) {
      ME_UNROLL for (int m = 0; m < ME_TILES * 2; ++m) hold[s][m] = me_chunk{};
    }
