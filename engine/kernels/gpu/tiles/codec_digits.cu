// Affine codes of 4 or 8 bits as unsigned bytes. The bytes of a word's high nibbles count 16 times as much, in a
// sum of their own.
ME_INLINE me_uint me_bytes(const me_chunk& c, int i, int n) {
  return ME_BITS == 4 ? c.w[n % ME_BITS] & (i ? 0xF0F0F0F0u : 0x0F0F0F0Fu) : c.w[(i * 4 + n) % ME_BITS];
}
ME_INLINE int me_whole(int c, int d) { return ME_BITS == 4 ? c * 16 + d : c + d; }
constexpr float ME_SUM_BY = 1.0f, ME_WHOLE_BY = ME_BITS == 4 ? 0x1p-4f : 1.0f;
// The input that meets byte p of word m of eight.
ME_INLINE constexpr int me_input(int m, int p) { return ME_BITS == 4 ? m + 2 * p : m * 4 + p; }
// The place of word m of eight number n of a chunk: those of one me_bytes(c, i, 0..3) lie side by side.
ME_INLINE constexpr int me_word(int n, int m) { return ME_BITS == 4 ? m * 4 + n : n * 2 + m; }

