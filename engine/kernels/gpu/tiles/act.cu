// Launch A leaves act as launch B's fragments: high parts, low parts, then the sum of every eight values.
// All lanes of a warp call it; value f of the expert whose steps begin at ``first`` is written where real is set.
ME_INLINE void me_keep(float* act, int first, int f, int sum_at, float value, bool real) {
  constexpr int wide = ME_DOWN_WIDE, each = 8 / wide;
  const me_uint s = me_split(value * ME_DOWN_BY);
  float sum = me_bits(s << 16) + me_bits(s & 0xFFFF0000u);
  ME_UNROLL for (int d = 1; d < 8; d *= 2) sum += me_swap(sum, d);
  if (!real) return;
  const int n = f % each, at = (first * 16 + me_place(f / each)) * 8 + (n % (each / 2)) * 2 * wide + n / (each / 2);
  const me_uint s16 = wide == 2 ? me_times(s, 16.0f) : 0;
  ME_UNROLL for (int low = 0; low < 2; ++low) {
    auto* const to = reinterpret_cast<unsigned short*>(act + low * (ME_DOWN_STEPS * 64)) + at;
    to[0] = static_cast<unsigned short>(s >> low * 16);
    if (wide == 2) to[2] = static_cast<unsigned short>(s16 >> low * 16);
  }
  if (f % 8 == 0) act[ME_DOWN_STEPS * 128 + sum_at / 8] = sum;
}
