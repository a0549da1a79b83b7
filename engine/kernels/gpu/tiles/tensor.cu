// The instructions of sm_80 and later that the tensor-core form is made of.
ME_INLINE void me_mma(float (&c)[4], me_uint a0, me_uint a1, me_uint a2, me_uint a3, me_uint b0, me_uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same for 32 inputs: unsigned bytes by signed bytes.
ME_INLINE void me_mma(int (&c)[4], me_uint a0, me_uint a1, me_uint a2, me_uint a3, me_uint b0, me_uint b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// (w & mask) | 0x43004300: two codes as the bfloat16 values 128 + q.
template <me_uint MASK> ME_INLINE me_uint me_nibbles(me_uint w) {
  me_uint r;
  asm("lop3.b32 %0, %1, %2, 0x43004300, 0xEA;" : "=r"(r) : "r"(w), "n"(MASK));
  return r;
}
// 16 bytes, or as many zeros.
ME_INLINE void me_copy(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"((me_uint)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
ME_INLINE void me_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> ME_INLINE void me_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
ME_INLINE me_uint me_bfloat(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
// Two values rounded to a pair.
ME_INLINE me_uint me_bfloats(float low, float high) {
  me_uint r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Weights are read once: they need no place in L1.
ME_INLINE uint4 me_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
