// Scales and biases of two neighbouring groups of a row.
struct alignas(2 * sizeof(ME_SCALE_TYPE)) me_two { ME_SCALE_TYPE a, b; };
struct me_scales { me_two s, b; };
template <int PER_ROW> ME_INLINE me_two me_two_at(const ME_SCALE_TYPE* row, int group) {
  // A row's last unit may be short; what lies past the row meets sums of zero.
  if (PER_ROW % 2 == 0 && ME_GROUPS > 1) {
    return *reinterpret_cast<const me_two*>(row + (group < PER_ROW ? group : PER_ROW - 2));
  }
  return {row[group < PER_ROW ? group : PER_ROW - 1], row[group + 1 < PER_ROW ? group + 1 : PER_ROW - 1]};
}
template <int PER_ROW> ME_INLINE me_scales me_scales_at(const ME_SCALE_TYPE* s, const ME_SCALE_TYPE* b, int group) {
  return {me_two_at<PER_ROW>(s, group), me_two_at<PER_ROW>(b, group)};
}
