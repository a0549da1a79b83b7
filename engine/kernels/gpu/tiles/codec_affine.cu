// Affine codes of up to 7 bits as the bfloat16 values 128 + q; an 8-bit code is two of 4 (ME_WIDE 2). What 128
// adds is taken off again with the sums of x that the biases need anyway.
constexpr int ME_PARTS = 1, ME_PIECES = 1;
constexpr float ME_X_BY = 1.0f, ME_SUM_BY = 1.0f, ME_OFFSET = ME_WIDE == 2 ? 128.0f * 17.0f : 128.0f;
constexpr me_uint ME_MASK = 0x00010001u * ((1u << ME_BITS) - 1u);

ME_INLINE me_uint me_code(const me_uint (&w)[ME_BITS], int at) {
  const int word = at / 32, bit = at % 32;
  return bit + ME_BITS <= 32 ? w[word] >> bit : __funnelshift_r(w[word], w[(word + 1) % ME_BITS], bit);
}
ME_INLINE me_uint me_pair(const me_chunk& c, int j, int i, int) {
  if (ME_BITS == 4) return me_nibbles<ME_MASK>(c.w[j % ME_BITS] >> i * 4);
  const int at = (j * 8 + i) * ME_BITS;
  return me_nibbles<ME_MASK>(__byte_perm(me_code(c.w, at), me_code(c.w, at + 4 * ME_BITS), 0x5410));
}
