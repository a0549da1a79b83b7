// A unit's values as digits.
constexpr int lanes = ME_SPAN / 8;
auto* const groups = reinterpret_cast<me_group*>(ring + ME_UNIT * 16);
auto begin_unit = [&](int a) {
  const uint4 p = values[a][0], q = values[a][1];
  const float in[8] = {me_bits(p.x), me_bits(p.y), me_bits(p.z), me_bits(p.w),
                       me_bits(q.x), me_bits(q.y), me_bits(q.z), me_bits(q.w)};
  const me_digits made = me_digits_of(in);
  if (lane < items) {
    me_put(reinterpret_cast<me_uint*>(ring), ME_UNIT * 32, lane, made);
    if (lane % lanes == 0) groups[lane / lanes] = made.group;
  }
  __syncwarp();
};
auto begin_step = [&] {};
auto inputs_at = [&](int, int s) { return ring + (g >= ME_GROUPS ? ME_UNIT * 8 : 0) + s * 8 + t * 2; };
auto end_step = [&](int) {};
auto end_unit = [&](int i, int a) {
  const me_inputs in = me_inputs_of(groups, 0, ME_GROUPS, t);
  __syncwarp();
  ask_act(i + ME_AHEAD, a);
  return in;
};
