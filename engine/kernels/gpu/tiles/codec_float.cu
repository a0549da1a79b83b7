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
