// Launch A's part, and then launch B's weights, which are on their way while other blocks still compute act.
ME_GROUP_ARRAY(int, said, 1)
int item = group;
do {
  if (item < ME_ITEMS) up_item(item);
  if (group < ME_DOWN_BLOCKS) {
    ME_UNROLL for (int s = 0; s < held; ++s) {
      ME_UNROLL for (int m = 0; m < ME_TILES * 2; ++m) hold[s][m] = me_chunk{};
    }
