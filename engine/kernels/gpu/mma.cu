// Tensor-core form: 16 rows by 128 nibbles a step. A row's 16 bytes in one lane hold 32 nibbles, and two of
// them four apart make one bfloat16 pair 128 + q, so x is kept in the same order ("fragments"). An 8-bit weight
// counts as two nibbles, of which the high one meets 16 * x.
// A warp sums over ME_UNIT steps at once. Column n of the product belongs to scale group n % ME_GROUPS of the
// unit and to the high (n < ME_GROUPS) or low parts of x: a lane feeds x to the one column that is its inputs',
// and zeros to the others, so every group has its own sum. What 128 adds is taken off again with the sums of x
// that the biases need anyway.
constexpr int ME_SPAN = ME_GROUP * ME_WIDE, ME_GROUPS = ME_UNIT * 128 / ME_SPAN;
constexpr float ME_OFFSET = ME_WIDE == 2 ? 128.0f * 17.0f : 128.0f;

// Scales and biases of two neighbouring groups of a row.
template <typename S> struct alignas(2 * sizeof(S)) me_two { S a, b; };
template <typename S> struct me_pairs { me_two<S> s, b; };

template <int PER_ROW, typename S> ME_INLINE me_two<S> me_pair(const S* row, int group) {
  // A row's last unit may be short; what lies past the row meets sums of zero.
  if (PER_ROW % 2 == 0 && ME_GROUPS > 1) {
    return *reinterpret_cast<const me_two<S>*>(row + (group < PER_ROW ? group : PER_ROW - 2));
  }
  return {row[group < PER_ROW ? group : PER_ROW - 1], row[group + 1 < PER_ROW ? group + 1 : PER_ROW - 1]};
}
template <int PER_ROW, typename S> ME_INLINE me_pairs<S> me_pairs_at(const S* s, const S* b, int group) {
  return {me_pair<PER_ROW>(s, group), me_pair<PER_ROW>(b, group)};
}

// v as bfloat16 parts: the high one in the low 16 bits, the low one in the high 16 bits.
ME_INLINE me_uint me_split(float v) {
  const me_uint high = me_bfloat(v);
  return high | me_bfloat(v - me_bits(high << 16)) << 16;
}
ME_INLINE me_uint me_sixteen(me_uint pair) {
  return me_bfloat(16.0f * me_bits(pair << 16)) | me_bfloat(16.0f * me_bits(pair & 0xFFFF0000u)) << 16;
}

// The fragment of 8 nibbles from neighbouring inputs in pairs: 8 inputs, or 4 and 16 times the 4.
ME_INLINE uint4 me_fragment(const me_uint (&p)[4]) {
  return {__byte_perm(p[0], p[2], 0x5410), __byte_perm(p[0], p[2], 0x7632), __byte_perm(p[1], p[3], 0x5410),
          __byte_perm(p[1], p[3], 0x7632)};
}
ME_INLINE uint4 me_fragment(const me_uint (&p)[2]) {
  const me_uint even = __byte_perm(p[0], p[1], 0x5410), odd = __byte_perm(p[0], p[1], 0x7632);
  return {even, me_sixteen(even), odd, me_sixteen(odd)};
}

// Where fragment v lies, so that the four lanes of a row read 64 bytes in a row.
ME_INLINE int me_place(int v) { return (v & ~15) + (v & 3) * 4 + (v >> 2 & 3); }

// Does this lane's column take this lane's inputs in this step of a unit?
ME_INLINE bool me_feeds(int lane, int step, int halves) {
  const int column = lane / 4;
  return column < halves * ME_GROUPS && column % ME_GROUPS == (step * 128 + lane % 4 * 32) / ME_SPAN;
}

// 16 rows (low: g, high: g + 8) by 128 nibbles, into two sums that do not wait for each other.
ME_INLINE void me_step(uint4 low, uint4 high, const uint4* x, float (&c)[4], float (&d)[4]) {
  const me_uint a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
  ME_UNROLL for (int j = 0; j < 4; ++j) {
    const uint4 f = x[j * 4];
    me_mma(c, me_nibbles(a[j]), me_nibbles(b[j]), me_nibbles(a[j] >> 4), me_nibbles(b[j] >> 4), f.x, f.y);
    me_mma(d, me_nibbles(a[j] >> 8), me_nibbles(b[j] >> 8), me_nibbles(a[j] >> 12), me_nibbles(b[j] >> 12), f.z,
           f.w);
  }
}

// A lane's two columns of one row, scaled; sum0 and sum1 are zero in all lanes but those that count the biases.
template <typename S> ME_INLINE float me_fold(me_pairs<S> p, float c0, float c1, float sum0, float sum1) {
  const float s0 = me_value(p.s.a);
  float v = s0 * c0 + (me_value(p.b.a) - ME_OFFSET * s0) * sum0;
  if (ME_GROUPS == 1) return v + s0 * c1;
  const float s1 = me_value(p.s.b);
  return v + s1 * c1 + (me_value(p.b.b) - ME_OFFSET * s1) * sum1;
}

#if ME_FRAGMENTS
// Launch A leaves act as launch B's fragments: high parts, low parts, then the sum of every eight values.
// All lanes of a warp call it; value number i is written where real is set.
ME_INLINE void me_keep(float* act, int i, float value, bool real) {
  constexpr int wide = ME_DOWN_WIDE, words = (ME_ROUTED + ME_SHARED) * wide / 2, each = 8 / wide;
  const me_uint s = me_split(value);
  float sum = me_bits(s << 16) + me_bits(s & 0xFFFF0000u);
  ME_UNROLL for (int d = 1; d < 8; d *= 2) sum += me_swap(sum, d);
  if (!real) return;
  const int n = i % each, at = me_place(i / each) * 8 + (n % (each / 2)) * 2 * wide + n / (each / 2);
  const me_uint s16 = wide == 2 ? me_sixteen(s) : 0;
  ME_UNROLL for (int low = 0; low < 2; ++low) {
    auto* const to = reinterpret_cast<unsigned short*>(act + low * words) + at;
    to[0] = static_cast<unsigned short>(s >> low * 16);
    if (wide == 2) to[2] = static_cast<unsigned short>(s16 >> low * 16);
  }
  if (i % 8 == 0) act[2 * words + i / 8] = sum;
}
#endif
