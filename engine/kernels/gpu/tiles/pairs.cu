// The form in pairs: codes i and i + 4 of every eight make one bfloat16 pair, so x is kept in the same order
// ("fragments"). An affine weight of 8 bits counts as two codes of 4, of which the high one meets 16 * x. Where a
// chunk has two scale groups (ME_PARTS), its halves go to two sums of their own. A codec file says how codes become
// pairs and how sums are scaled.
typedef float me_acc;
typedef float me_group;
constexpr int ME_STEP_X = 16, ME_LANE_X = 1;

// Sums of x over a lane's two groups of a unit, in the lanes that count the biases.
struct me_inputs { float sum0, sum1; };
ME_INLINE me_inputs me_inputs_of(const me_group* sums, int first, int count, int t) {
  const int column = 2 * t % ME_GROUPS;
  const bool counts = ME_SUMMED && 2 * t < ME_GROUPS;
  const float sum0 = counts && first + column < count ? sums[first + column] : 0.0f;
  return {sum0, ME_GROUPS > 1 && counts && first + column + 1 < count ? sums[first + column + 1] : 0.0f};
}
