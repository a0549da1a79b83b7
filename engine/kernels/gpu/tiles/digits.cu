// The product of a chunk's bytes with inputs of two signed bytes each, in integers. Column n belongs to scale group
// n % ME_GROUPS and to the high (n < ME_GROUPS) or the low bytes.
typedef int me_acc;
constexpr int ME_STEP_X = 8, ME_LANE_X = 2;
// What a group's whole numbers are multiplied by, and the sum of its inputs.
struct me_group { float by, sum; };

// Eight inputs as bytes; ``low`` still counts from -128.
struct me_digits {
  me_uint high[2], low[2];
  me_group group;
};
ME_INLINE me_uint me_four(const me_uint (&u)[8], int m, me_uint which) {
  return __byte_perm(__byte_perm(u[me_input(m, 0)], u[me_input(m, 1)], which),
                     __byte_perm(u[me_input(m, 2)], u[me_input(m, 3)], which), 0x5410);
}
// The inputs of a group lie in lanes side by side, all of which call it. The largest becomes 2^14 to 2^15: what is
// rounded off an input is at most 2^-15 of it.
ME_INLINE me_digits me_digits_of(const float (&v)[8]) {
  me_uint most = 0;
  ME_UNROLL for (int n = 0; n < 8; ++n) most = max(most, __float_as_uint(v[n]) & 0x7FFFFFFFu);
  ME_UNROLL for (int d = 1; d < ME_SPAN / 8; d *= 2) most = max(most, me_uint(me_swap(int(most), d)));
  // Above 32639.5 the high byte would not do: such a number has the next exponent's scale.
  const me_uint exponent = max((most + 0x10100u) >> 23, 15u);
  const float by = me_bits((exponent - 14u) << 23), inverse = me_bits((268u - exponent) << 23);
  me_digits r;
  me_uint u[8], sum = 0;
  ME_UNROLL for (int n = 0; n < 8; ++n) {
    // Its last bits are the rounded number and 128.
    u[n] = __float_as_uint(v[n] * inverse + 12583040.0f);
    sum += u[n];
  }
  ME_UNROLL for (int m = 0; m < 2; ++m) {
    r.high[m] = me_four(u, m, 0x0051);
    r.low[m] = me_four(u, m, 0x0040) ^ 0x80808080u;
  }
  int whole = int(sum - 8u * 0x4B400080u);
  ME_UNROLL for (int d = 1; d < ME_SPAN / 8; d *= 2) whole += me_swap(whole, d);
  // Infinities and what is not a number stay so.
  r.group.by = most < 0x7F800000u ? by : me_bits(most);
  r.group.sum = r.group.by * float(whole);
  return r;
}
// Puts eight inputs, number v of a row, where me_step reads them; ``low`` lies so many words behind.
ME_INLINE void me_put(me_uint* to, int behind, int v, const me_digits& d) {
  ME_UNROLL for (int m = 0; m < 2; ++m) {
    const int at = v / 4 * 8 + me_word(v % 4, m);
    to[at] = d.high[m];
    to[at + behind] = d.low[m];
  }
}

// 16 rows (low: g, high: g + 8) by 128 codes.
ME_INLINE void me_step(const me_chunk& low, const me_chunk& high, const uint4* x, int (&c)[4], int (&d)[4]) {
  ME_UNROLL for (int i = 0; i < 2; ++i) {
    const uint4 f = x[i];
    int(&sum)[4] = i ? d : c;
    me_mma(sum, me_bytes(low, i, 0), me_bytes(high, i, 0), me_bytes(low, i, 1), me_bytes(high, i, 1), f.x, f.y);
    me_mma(sum, me_bytes(low, i, 2), me_bytes(high, i, 2), me_bytes(low, i, 3), me_bytes(high, i, 3), f.z, f.w);
  }
}

// What a unit's inputs are to this lane's two columns; biases count where the high bytes are.
struct me_inputs { float by0, by1, sum0, sum1; };
ME_INLINE me_inputs me_inputs_of(const me_group* groups, int first, int count, int t) {
  const int column = 2 * t % ME_GROUPS;
  const bool high = 2 * t < ME_GROUPS;
  const float digit = ME_WHOLE_BY * (high ? 256.0f : 1.0f);
  const me_group none = {0.0f, 0.0f};
  const me_group a = first + column < count ? groups[first + column] : none;
  const me_group b = first + column + 1 < count ? groups[first + column + 1] : none;
  return {a.by * digit, b.by * digit, high ? a.sum : 0.0f, high ? b.sum : 0.0f};
}
ME_INLINE float me_fold(me_scales p, int c0, int d0, int c1, int d1, me_inputs in) {
  return me_value(p.s.a) * in.by0 * float(me_whole(c0, d0)) + me_value(p.b.a) * in.sum0 +
         (me_value(p.s.b) * in.by1 * float(me_whole(c1, d1)) + me_value(p.b.b) * in.sum1);
}
