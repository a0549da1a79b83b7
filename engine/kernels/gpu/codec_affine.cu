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

// A lane's two columns of one row, scaled; sum0 and sum1 are zero in all lanes but those that count the biases.
ME_INLINE float me_fold(me_scales p, float c0, float d0, float c1, float d1, float sum0, float sum1) {
  const float s0 = me_value(p.s.a);
  float v = s0 * (c0 + d0) + (me_value(p.b.a) - ME_OFFSET * s0) * sum0;
  if (ME_GROUPS == 1) return v + s0 * (c1 + d1);
  const float s1 = me_value(p.s.b);
  return v + s1 * (c1 + d1) + (me_value(p.b.b) - ME_OFFSET * s1) * sum1;
}
