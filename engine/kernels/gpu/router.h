// One warp routes one token: lane l holds the experts l, l + 32, ...
constexpr int held = (ME_E + 31) / 32;
// Stands for minus infinity: fast mathematics may assume that infinities do not happen.
const float none = -3.0e38f;
float score[held], choice[held];
float top = none;
ME_UNROLL for (int i = 0; i < held; ++i) {
  const int e = i * 32 + lane;
  score[i] = e < ME_E ? ME_LOGIT(e < ME_E ? e : 0) : none;
  top = me_max(top, score[i]);
}
#if ME_SCORE_KIND == 0
ME_UNROLL for (int d = 16; d > 0; d /= 2) top = me_max(top, me_swap(top, d));
float total = 0.0f;
ME_UNROLL for (int i = 0; i < held; ++i) {
  score[i] = i * 32 + lane < ME_E ? me_exp(score[i] - top) : 0.0f;
  total += score[i];
}
total = 1.0f / me_sum(total);
ME_UNROLL for (int i = 0; i < held; ++i) score[i] *= total;
#elif ME_SCORE_KIND == 1
ME_UNROLL for (int i = 0; i < held; ++i) score[i] = 1.0f / (1.0f + me_exp(-score[i]));
#else
// softplus without overflow, and without cancellation where it is close to exp(x)
ME_UNROLL for (int i = 0; i < held; ++i) {
  const float v = score[i], small = me_exp(v < 0.0f ? v : -v);
  const float one = 1.0f + small;
  score[i] = me_sqrt((v > 0.0f ? v : 0.0f) + (one == 1.0f ? small : me_log(one) * (small / (one - 1.0f))));
}
#endif
ME_UNROLL for (int i = 0; i < held; ++i) {
  const int e = i * 32 + lane;
  choice[i] = e < ME_E ? score[i] + ME_BIAS : none;
}
#if ME_GROUPS > 1
constexpr int each = ME_E / ME_GROUPS;
float best[ME_GROUPS];
ME_UNROLL for (int g = 0; g < ME_GROUPS; ++g) {
  float first = none, second = none;
  ME_UNROLL for (int i = 0; i < held; ++i) {
    if ((i * 32 + lane) / each == g) {
      second = me_max(second, me_min(first, choice[i]));
      first = me_max(first, choice[i]);
    }
  }
  ME_UNROLL for (int d = 16; d > 0; d /= 2) {
    const float f = me_swap(first, d), s = me_swap(second, d);
    second = me_max(me_min(first, f), me_max(second, s));
    first = me_max(first, f);
  }
  best[g] = ME_GROUP_TOP2 ? first + second : first;
}
me_uint kept = 0;
for (int n = 0; n < ME_KEEP; ++n) {
  int pick = 0;
  float high = none * 1.1f;
  ME_UNROLL for (int g = 0; g < ME_GROUPS; ++g) {
    if (((kept >> g) & 1u) == 0u && best[g] > high) {
      high = best[g];
      pick = g;
    }
  }
  kept |= 1u << pick;
}
ME_UNROLL for (int i = 0; i < held; ++i) {
  if (((kept >> ((i * 32 + lane) / each & 31)) & 1u) == 0u) choice[i] = none;
}
#endif
// Lane n keeps the expert of rank n and its unbiased score.
float part = 0.0f;
me_uint expert = 0;
for (int n = 0; n < ME_K; ++n) {
  // Expert 0 stands for "no finite candidate", so that an index is always one of an expert.
  float high = none, its = score[0];
  int who = 0;
  ME_UNROLL for (int i = 0; i < held; ++i) {
    if (choice[i] > high) {
      high = choice[i];
      its = score[i];
      who = i * 32 + lane;
    }
  }
  ME_UNROLL for (int d = 16; d > 0; d /= 2) {
    const float h = me_swap(high, d), s = me_swap(its, d);
    const int w = me_swap(who, d);
    if (h > high || (h == high && w < who)) {
      high = h;
      its = s;
      who = w;
    }
  }
  ME_UNROLL for (int i = 0; i < held; ++i) {
    if (i * 32 + lane == who) choice[i] = none;
  }
  if (lane == n) {
    part = high > none ? its : me_bits(0x7FC00000u);
    expert = me_uint(who);
  }
}
#if ME_NORMALISE == 1
const float divisor = me_sum(part) + ME_ROUTE_EPS;
#elif ME_NORMALISE == 2
const float divisor = me_max(me_sum(part), ME_ROUTE_EPS);
#else
const float divisor = 1.0f;
#endif
if (lane < ME_K) {
  chosen[lane] = expert;
  // All scores may underflow; a factor of 1 / divisor could overflow where the shares do not.
  share[lane] = divisor == 0.0f ? 0.0f : part / divisor * ME_ROUTE_SCALE;
}
