// Value f of a pair's activation, rounded to where its fragment lies.
template <typename T> ME_INLINE void me_keep(T* act, int pair, int f, float value) {
  const int i = f % 8, at = me_place(f / 8) * 8 + (i < 4 ? i * 2 : i * 2 - 7);
  me_set(act + int64_t(pair) * (ME_ACT_STEPS * 128) + at, value);
}
