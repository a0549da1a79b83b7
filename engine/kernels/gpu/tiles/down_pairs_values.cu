// A unit's values as fragments of high and of low parts, and this lane's share of their sums.
static_assert(ME_WIDE == 1, "codes of 8 affine bits are taken as digits");
constexpr int eights = ME_SPAN / 8;
float sums = 0.0f;
auto begin_unit = [&](int a) {
  const uint4 p = values[a][0], q = values[a][1];
  const float in[8] = {me_bits(p.x), me_bits(p.y), me_bits(p.z), me_bits(p.w),
                       me_bits(q.x), me_bits(q.y), me_bits(q.z), me_bits(q.w)};
  me_uint parts[2][4];
  sums = 0.0f;
  ME_UNROLL for (int n = 0; n < 4; ++n) {
    const me_uint v = me_split(ME_X_BY * in[2 * n]), w = me_split(ME_X_BY * in[2 * n + 1]);
    parts[0][n] = __byte_perm(v, w, 0x5410);
    parts[1][n] = __byte_perm(v, w, 0x7632);
    ME_UNROLL for (int h = 0; h < 2; ++h) {
      sums += me_bits(parts[h][n] << 16) + me_bits(parts[h][n] & 0xFFFF0000u);
    }
  }
  if (lane < items) {
    uint4* const to = ring + lane / 16 * 32 + me_place(lane % 16);
    ME_UNROLL for (int h = 0; h < 2; ++h) to[h * 16] = me_fragment(parts[h]);
  }
  __syncwarp();
};
auto begin_step = [&] {};
auto inputs_at = [&](int, int s) { return ring + s * 32 + (g >= ME_GROUPS ? 16 : 0) + t; };
auto end_step = [&](int) {};
auto end_unit = [&](int i, int a) {
  me_inputs in = {0.0f, 0.0f};
  if (ME_SUMMED) {
    float sum = sums;
    ME_UNROLL for (int n = 1; n < eights; n *= 2) sum += me_swap(sum, n);
    const float group0 = __shfl_sync(0xffffffffu, sum, column * eights & 31);
    const float group1 = __shfl_sync(0xffffffffu, sum, (column + 1) * eights & 31);
    if (2 * t < ME_GROUPS) in = {group0, group1};
  }
  __syncwarp();
  ask_act(i + ME_AHEAD, a);
  return in;
};
