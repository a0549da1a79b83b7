// act comes as float32 from all blocks: a word is ME_NOTHING until its value is there, so that to see it is to have
// it. A lane takes eight of a unit's values.
constexpr int items = ME_UNIT * 16;
uint4 values[ME_AHEAD][2];
// The place of this lane's values of unit number j, or -1 where it has none.
auto place_of = [&](int j) {
  const int unit = first + j;
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units, f = (u * items + lane) * 8;
  return j < count && lane < items && f < (own ? ME_SHARED : ME_F) ? k * ME_F + f : -1;
};
// Looks until a unit's values are there. Returns -1, or after long the place of one that is not.
auto await_act = [&](int j, int a) {
  const int at = place_of(j);
  for (int look = 0;; ++look) {
    bool lacks = false;
    ME_UNROLL for (int n = 0; n < 2; ++n) {
      const uint4 v = at < 0 ? uint4{0, 0, 0, 0} : me_fresh(reinterpret_cast<const uint4*>(act + at) + n);
      lacks = lacks || v.x == ME_NOTHING || v.y == ME_NOTHING || v.z == ME_NOTHING || v.w == ME_NOTHING;
      values[a][n] = v;
    }
    const me_uint who = __ballot_sync(0xffffffffu, lacks);
    if (!who) return -1;
    if (look == ME_PATIENCE) return __shfl_sync(0xffffffffu, at, __ffs(who) - 1);
  }
};
// The first units last: their values are kept.
auto await_all = [&] {
  int lost = -1;
  for (int j = count - 1; j >= 0 && lost < 0; --j) lost = await_act(j, j < ME_AHEAD ? j : 0);
  return lost;
};
auto ask_act = [&](int j, int a) {
  if (j < count) await_act(j, a);
};
auto ask_first = [&] {};
