// act comes as float32, by units. A lane takes eight of a unit's values.
constexpr int items = ME_UNIT * 16;
uint4 values[ME_AHEAD][2];
auto ask_act = [&](int j, int a) {
  const int unit = first + j;
  const bool own = is_own(unit);
  const int k = own ? ME_K : unit / units, u = own ? unit - routed : unit % units, f = (u * items + lane) * 8;
  const bool there = j < count && lane < items && f < (own ? ME_SHARED : ME_F);
  ME_UNROLL for (int n = 0; n < 2; ++n) {
    values[a][n] = there ? reinterpret_cast<const uint4*>(act)[(k * ME_F + f) / 4 + n] : uint4{0, 0, 0, 0};
  }
};
auto ask_first = [&] { ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_act(a, a); };
