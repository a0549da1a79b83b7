// mxfp4, mxfp8 and nvfp4. A code's exponent and mantissa moved to their place in a bfloat16 are its value times
// 2^-126 (e2m1) or 2^-120 (e4m3), subnormal codes included. x is multiplied by 2^64 to meet them, and the sums
// by what is left.
constexpr int ME_PARTS = ME_GROUP_SIZE == 16 ? 2 : 1, ME_PIECES = 1;
constexpr float ME_X_BY = 0x1p64f;
// An e4m3 scale is read as a float16, which is 2^-8 of it.
constexpr float ME_SUM_BY = ME_GROUP_SIZE == 16 ? 0x1p70f : ME_BITS == 4 ? 0x1p62f : 0x1p56f;

ME_INLINE me_uint me_signed(me_uint sign, me_uint value) { return (sign & 0x80008000u) | value; }
ME_INLINE me_uint me_pair(const me_chunk& c, int j, int i, int) {
  if (ME_BITS == 4) {
    const me_uint w = c.w[j], m = i < 2 ? w << (6 - 4 * i & 31) : w >> (4 * i - 6 & 31);
    return me_signed(w << (12 - 4 * i), m & 0x01C001C0u);
  }
  const me_uint w = __byte_perm(c.w[2 * j % ME_BITS], c.w[(2 * j + 1) % ME_BITS], 0x4000 + i * 0x1010);
  return me_signed(w, w >> 4 & 0x07F007F0u);
}

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
ME_INLINE float me_fold(me_scales p, float c0, float d0, float c1, float d1, float, float) {
  if (ME_PARTS == 1) return me_scale(p.s, 0) * (c0 + d0) + me_scale(p.s, 1) * (c1 + d1);
  return me_scale(p.s, 0) * c0 + me_scale(p.s, 1) * d0 + (me_scale(p.s, 2) * c1 + me_scale(p.s, 3) * d1);
}
