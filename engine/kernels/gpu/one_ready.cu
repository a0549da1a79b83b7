  }
  if (group >= ME_DOWN_BLOCKS) return;
  item = me_next(state, ME_ITEMS, group, warp, lane, said);
} while (item >= 0);
