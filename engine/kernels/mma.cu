// Tensor-core form: 16 rows by 128 nibbles a step. A row's 16 bytes in one lane hold 32 nibbles, and two of
// them four apart make one bfloat16 pair 128 + q, so x is kept in the same order ("fragments"). An 8-bit weight
// counts as two nibbles, of which the high one meets 16 * x. Column n of the product takes scale group
// n % ME_GROUPS of the step, from the high half of x (n < ME_GROUPS) or from its low half, so every
// group has its own sum; what 128 adds is taken off again with the sums of x that the biases need anyway.
constexpr int ME_GROUPS = 128 / ME_SPAN;
// What the 128 in every nibble adds to a weight.
constexpr float ME_OFFSET = ME_WIDE == 2 ? 128.0f * 17.0f : 128.0f;

template <typename T> struct alignas(2 * sizeof(T)) me_two { T a, b; };

// v as bfloat16 halves: high in the low 16 bits, low in the high 16 bits.
ME_INLINE me_uint me_split(float v) {
  const me_uint high = me_bfloat(v);
  return high | me_bfloat(v - me_bits(high << 16)) << 16;
}
ME_INLINE me_uint me_part(me_uint v, bool low) { return low ? v >> 16 : v & 0xFFFFu; }
ME_INLINE me_uint me_part16(me_uint v, bool low) { return me_bfloat(16.0f * me_bits(me_part(v, low) << 16)); }

// The high or the low parts of the inputs behind 8 nibbles, each beside the one that shares its pair.
template <int N> ME_INLINE uint4 me_fragment(const me_uint (&s)[N], bool low) {
  if (N == 8) {
    return {me_part(s[0], low) | me_part(s[4 % N], low) << 16, me_part(s[1], low) | me_part(s[5 % N], low) << 16,
            me_part(s[2], low) | me_part(s[6 % N], low) << 16, me_part(s[3], low) | me_part(s[7 % N], low) << 16};
  }
  return {me_part(s[0], low) | me_part(s[2], low) << 16, me_part16(s[0], low) | me_part16(s[2], low) << 16,
          me_part(s[1], low) | me_part(s[3], low) << 16, me_part16(s[1], low) | me_part16(s[3], low) << 16};
}

// Where vector v (8 nibbles' worth of x) lies, so that the four lanes of a row read 64 bytes in a row.
ME_INLINE int me_place(int v) { return (v & ~15) + (v & 3) * 4 + (v >> 2 & 3); }

// Is this lane's column fed by this lane's 32 nibbles?
ME_INLINE bool me_feeds(int lane, int halves) {
  const int column = lane / 4;
  return column < halves * ME_GROUPS && column % ME_GROUPS == lane % 4 * ME_GROUPS / 4;
}

// 16 rows (low: g, high: g + 8) by 128 nibbles, into two sums that do not wait for each other.
ME_INLINE void me_step(uint4 low, uint4 high, const uint4 (&x)[4], float (&c)[4], float (&d)[4]) {
  const me_uint a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
  ME_UNROLL for (int j = 0; j < 4; ++j) {
    me_mma(c, me_nibbles(a[j]), me_nibbles(b[j]), me_nibbles(a[j] >> 4), me_nibbles(b[j] >> 4), x[j].x, x[j].y);
    me_mma(d, me_nibbles(a[j] >> 8), me_nibbles(b[j] >> 8), me_nibbles(a[j] >> 12), me_nibbles(b[j] >> 12),
           x[j].z, x[j].w);
  }
}

// One row's two columns of a lane, scaled; the lanes of the low half get sums of 0.
template <typename S>
ME_INLINE float me_fold(const S* scales, const S* biases, int t, float c0, float c1, float sum0, float sum1) {
  if (ME_GROUPS == 1) {
    const float s = me_value(scales[0]);
    return s * (c0 + c1) + (me_value(biases[0]) - ME_OFFSET * s) * sum0;
  }
  const int column = t * 2 % ME_GROUPS;
  const me_two<S> s = *reinterpret_cast<const me_two<S>*>(scales + column);
  const me_two<S> b = *reinterpret_cast<const me_two<S>*>(biases + column);
  const float s0 = me_value(s.a), s1 = me_value(s.b);
  return s0 * c0 + s1 * c1 + (me_value(b.a) - ME_OFFSET * s0) * sum0 + (me_value(b.b) - ME_OFFSET * s1) * sum1;
}

#if ME_FRAGMENTS
// Launch A leaves act as launch B's fragments: high parts, low parts, then the sum of every eight values.
// All lanes of a warp call it; value number i is written where real is set.
ME_INLINE void me_keep(float* act, int i, float value, bool real) {
  constexpr int wide = ME_DOWN_WIDE, words = ME_K * ME_F * wide / 2, each = 8 / wide;
  const me_uint s = me_split(value);
  float sum = me_bits(s << 16) + me_bits(s & 0xFFFF0000u);
  ME_UNROLL for (int d = 1; d < 8; d *= 2) sum += me_swap(sum, d);
  if (!real) return;
  const int n = i % each, at = me_place(i / each) * 8 + (n % (each / 2)) * 2 * wide + n / (each / 2);
  ME_UNROLL for (int low = 0; low < 2; ++low) {
    auto* const to = reinterpret_cast<unsigned short*>(act + low * words) + at;
    to[0] = static_cast<unsigned short>(me_part(s, low));
    if (wide == 2) to[2] = static_cast<unsigned short>(me_part16(s, low));
  }
  if (i % 8 == 0) act[2 * words + i / 8] = sum;
}
#endif
