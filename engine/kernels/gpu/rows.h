// One warp, one row: decoding of every format and the product of a chunk of a row with a chunk of x.
// Formats as numbers: 0 affine, 1 mxfp4, 2 mxfp8, 3 nvfp4, 4 bfloat16, 5 float16, 6 float32.

// Twice the value of an e2m1 code, which is a whole number.
ME_INLINE float me_e2m1(me_uint code) {
  const float v = float((0xC8643210u >> ((code & 7u) * 4u)) & 15u);
  return (code & 8u) ? -v : v;
}

// Subnormals are built by a product: float32 subnormals may be flushed to zero.
ME_INLINE float me_e4m3(me_uint code) {
  const float v =
      (code & 0x78u) ? me_bits(((code & 0x7Fu) << 20) + 0x3C000000u) : float(code & 7u) * 0.001953125f;
  return (code & 0x80u) ? -v : v;
}

ME_INLINE float me_e8m0(me_uint code) { return me_bits(code << 23); }

// N weights from N * BITS / 32 words: MLX packs every width as one little-endian stream of bits.
template <int FORMAT, int BITS, int N>
ME_INLINE void me_unpack(ME_DEVICE const me_uint* p, ME_THREAD float (&q)[N]) {
  constexpr int W = N * BITS / 32;
  constexpr me_uint mask = 0xFFFFFFFFu >> (32 - BITS);
  me_uint w[W + 1];
  me_words<W>(p, w);
  ME_UNROLL for (int j = 0; j < N; ++j) {
    const int word = j * BITS / 32, shift = j * BITS % 32;
    me_uint code = w[word] >> shift;
    if (shift + BITS > 32) code |= w[word + 1] << ((32 - shift) & 31);
    code &= mask;
    if (FORMAT == 0) q[j] = float(code);
    if (FORMAT == 1 || FORMAT == 3) q[j] = me_e2m1(code);
    if (FORMAT == 2) q[j] = me_e4m3(code);
    if (FORMAT == 4) q[j] = me_bits(code << 16);
    if (FORMAT == 5) q[j] = me_half(code);
    if (FORMAT == 6) q[j] = me_bits(code);
  }
}

// Chunk number c of a row times the N values x, whose sum is given. Unscaled formats ignore the pointers.
template <int FORMAT, int BITS, int GROUP, int N, typename S>
ME_INLINE float me_dot(ME_DEVICE const me_uint* row, ME_DEVICE const S* scales, ME_DEVICE const S* biases, int c,
                       ME_THREAD const float (&x)[N], float sum) {
  constexpr int span = (GROUP == 0 || GROUP > N) ? N : GROUP;
  float q[N];
  me_unpack<FORMAT, BITS, N>(row + c * (N * BITS / 32), q);
  float total = 0.0f;
  ME_UNROLL for (int part = 0; part < N / span; ++part) {
    float dot = 0.0f;
    ME_UNROLL for (int j = part * span; j < (part + 1) * span; ++j) dot += q[j] * x[j];
    const int at = GROUP == 0 ? 0 : (c * N + part * span) / (GROUP == 0 ? 1 : GROUP);
    if (FORMAT == 0) total += me_value(scales[at]) * dot + me_value(biases[at]) * sum;
    if (FORMAT == 1) total += 0.5f * me_e8m0(me_uint(scales[at])) * dot;
    if (FORMAT == 2) total += me_e8m0(me_uint(scales[at])) * dot;
    if (FORMAT == 3) total += 0.5f * me_e4m3(me_uint(scales[at])) * dot;
    if (FORMAT >= 4) total += dot;
  }
  return total;
}
