// Launch A's part. Launch B's weights are on their way meanwhile, and wait in shared memory. Blocks that do not run
// yet (another kernel has their place) are never waited for: their share is computed here after a while.
ME_GROUP_ARRAY(int, said, 1)
int item = group;
do {
  if (item < ME_ITEMS) up_item(item);
  if (group >= ME_DOWN_BLOCKS) return;
  if (!asked) ask_down();
  int lost = await_all();
#if ME_WEIGHED
  for (int look = 0; lost < 0 && __float_as_uint(me_fresh(act + ME_WEIGH_AT)) == ME_NOTHING; ++look) {
    if (look == ME_PATIENCE) lost = ME_WEIGH_AT;
  }
#endif
  if (!__syncthreads_or(lost >= 0)) break;
  if (lost >= 0) {
    const bool own = lost >= ME_ROUTED;
    const int block = (own ? lost - ME_ROUTED : lost % ME_F) / ME_ITEM_ROWS;
    *said = ME_WEIGHED && lost == ME_WEIGH_AT ? ME_ITEMS - 1
            : own                             ? ME_ROUTED_ITEMS + block
                                              : block * ME_K + lost / ME_F;
  }
  __syncthreads();
  item = *said;
} while (true);
