// The bytes of two neighbouring groups of a row, or of the four that two neighbouring chunks have.
struct me_scales { me_uint s; };
template <int PER_ROW> ME_INLINE me_scales me_scales_at(const uint8_t* row, int group) {
  constexpr int count = 2 * ME_PARTS;
  if (PER_ROW % count == 0) {
    const uint8_t* const p = row + (group * ME_PARTS < PER_ROW ? group * ME_PARTS : PER_ROW - count);
    return {ME_PARTS == 2 ? *reinterpret_cast<const me_uint*>(p) : *reinterpret_cast<const unsigned short*>(p)};
  }
  me_uint s = 0;
  ME_UNROLL for (int i = 0; i < count; ++i) {
    const int at = group * ME_PARTS + i;
    s |= me_uint(row[at < PER_ROW ? at : PER_ROW - 1]) << i * 8;
  }
  return {s};
}

ME_INLINE float me_scale(me_uint s, int i) {
  return ME_GROUP_SIZE == 16 ? me_half((s >> i * 8 & 0x7Fu) << 7) : me_bits((s >> i * 8 & 0xFFu) << 23);
}
ME_INLINE float me_fold(me_scales p, float c0, float d0, float c1, float d1, me_inputs) {
  if (ME_PARTS == 1) return me_scale(p.s, 0) * (c0 + d0) + me_scale(p.s, 1) * (c1 + d1);
  return me_scale(p.s, 0) * c0 + me_scale(p.s, 1) * d0 + (me_scale(p.s, 2) * c1 + me_scale(p.s, 3) * d1);
}
