// Leaves a value where ME_NOTHING was, which is itself not a number: such a value is left as another of its kind.
ME_INLINE void me_leave(float* to, float value) {
  const me_uint bits = __float_as_uint(value);
  me_leave_word(to, bits == ME_NOTHING ? 0x7FFFFFFFu : bits);
}
