// Does this lane's column take this lane's inputs in this step of a unit?
ME_INLINE bool me_feeds(int lane, int step) {
  const int column = lane / 4;
  return column < ME_HALVES * ME_GROUPS && column % ME_GROUPS == (step * 128 + lane % 4 * 32) / ME_SPAN;
}
