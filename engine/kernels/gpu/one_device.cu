// What the one launch needs from a GPU alone: tests replace this file.
// Marks an item as done, for blocks anywhere: a bit of words that start at zero. What this block wrote before is seen
// by whoever sees the bit.
ME_INLINE void me_mark(const me_uint* state, int item, int tid) {
  __syncthreads();
  if (tid == 0) {
    __threadfence();
    atomicOr(const_cast<me_uint*>(state) + item / 32, 1u << item % 32);
  }
}
ME_INLINE me_uint me_marks(const me_uint* word) {
  me_uint v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
ME_INLINE float me_fresh(const float* p) { return __ldcg(p); }
