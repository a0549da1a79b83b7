// Plain weights of 16 bits. A float16 is the sum of two bfloat16 values, so it takes two products.
constexpr int ME_PARTS = 1, ME_PIECES = ME_IS_HALF ? 2 : 1;
constexpr float ME_X_BY = 1.0f, ME_SUM_BY = 1.0f;

ME_INLINE me_uint me_pair(const me_chunk& c, int j, int i, int piece) {
  const me_uint w = __byte_perm(c.w[j * 4 + i / 2], c.w[j * 4 + 2 + i / 2], i % 2 ? 0x7632 : 0x5410);
  if (!ME_IS_HALF) return w;
  return __byte_perm(me_split(me_half(w & 0xFFFFu)), me_split(me_half(w >> 16)), piece ? 0x7632 : 0x5410);
}
