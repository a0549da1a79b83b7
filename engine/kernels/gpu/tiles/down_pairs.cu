// act comes as fragments, by steps. A lane copies a fragment of the high parts or of the low ones, of the inputs that
// chunk lane % 4 of a step has.
constexpr int eights = ME_SPAN / ME_WIDE / 8;
const int copied = lane % 4;
const uint4* const fragments = reinterpret_cast<const uint4*>(act) + lane / 16 * (pairs * 16) + lane % 16;
float sums[ME_AHEAD];
auto ask_act = [&](int j) {
  const int unit = first + j / ME_UNIT, before = is_own(unit) ? ME_K * steps : unit / units * steps;
  if (j < count * ME_UNIT && is_there(unit, j % ME_UNIT)) {
    const uint4* const from = fragments + (before + step_of(unit, j % ME_UNIT)) * 16;
    me_copy(ring + j % ME_STAGES * 32 + lane, from, has(unit, j % ME_UNIT, copied));
  }
  me_commit();
};
// This lane's share of the sums of eight that launch A left behind the fragments.
auto ask_sums = [&](int j, int a) {
  const int unit = first + j;
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units;
  const int i = u * (ME_GROUPS * eights) + lane;
  const bool there = j < count && lane < ME_GROUPS * eights && i < (own ? ME_SHARED : ME_F) / 8;
  if (ME_SUMMED) sums[a] = there ? act[pairs * 128 + k * (ME_F / 8) + i] : 0.0f;
};
auto ask_first = [&] {
  ME_UNROLL for (int j = 0; j < ME_STAGES; ++j) ask_act(j);
  ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_sums(a, a);
};
auto begin_unit = [&](int) {};
auto begin_step = [&] {
  me_wait<ME_STAGES - 1>();
  __syncwarp();
};
auto inputs_at = [&](int j, int) { return ring + j % ME_STAGES * 32 + (g >= ME_GROUPS ? 16 : 0) + t; };
auto end_step = [&](int j) {
  __syncwarp();
  ask_act(j + ME_STAGES);
};
auto end_unit = [&](int i, int a) {
  me_inputs in = {0.0f, 0.0f};
  if (ME_SUMMED) {
    float sum = sums[a];
    ME_UNROLL for (int n = 1; n < eights; n *= 2) sum += me_swap(sum, n);
    const float group0 = __shfl_sync(0xffffffffu, sum, column * eights & 31);
    const float group1 = __shfl_sync(0xffffffffu, sum, (column + 1) * eights & 31);
    if (2 * t < ME_GROUPS) in = {group0, group1};
  }
  ask_sums(i + ME_AHEAD, a);
  return in;
};
