// Pairs of weights as bfloat16, scaled: what a chunk's codes become before the product.
struct me_line { float s[ME_PARTS], b; };

ME_INLINE me_uint me_weights(const me_chunk& c, me_line l, int j, int i) {
  const float s = l.s[ME_PARTS == 2 && j >= 2 ? ME_PARTS - 1 : 0];
  if (ME_FORMAT == 0 && ME_BITS == 8) {
    const me_uint a = c.w[2 * j % ME_BITS], b = c.w[(2 * j + 1) % ME_BITS];
    const float low = me_bits(__byte_perm(a, 0x4B000000u, 0x7650 + i)) - 8388608.0f;
    const float high = me_bits(__byte_perm(b, 0x4B000000u, 0x7650 + i)) - 8388608.0f;
    return me_bfloats(low * s + l.b, high * s + l.b);
  }
  const me_uint w = me_pair(c, j, i, 0);
  if (ME_FORMAT > 3) return w;
  const float low = me_bits(w << 16), high = me_bits(w & 0xFFFF0000u);
  if (ME_FORMAT == 0) return me_bfloats(low * s + l.b, high * s + l.b);
  return me_bfloats(low * ME_X_BY * s, high * ME_X_BY * s);
}
