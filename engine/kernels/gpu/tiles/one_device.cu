// What the one launch needs from a GPU alone: tests replace this file.
// Words that other blocks write, and what is left for them: the value is all that is said, so nothing else is ordered.
ME_INLINE uint4 me_fresh(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
ME_INLINE float me_fresh(const float* p) {
  me_uint v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return __uint_as_float(v);
}
ME_INLINE void me_leave_word(float* to, me_uint bits) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
