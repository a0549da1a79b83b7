// What the pieces need from a GPU alone: tests replace this file.
// Asks for the bytes from p on, 128 at a time, without waiting.
ME_INLINE void me_ask(const void* p, int bytes, int lane) {
  for (int i = lane * 128; i < bytes; i += 32 * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p) + i));
  }
}
// Whether this block is the last of so many to come here; the last one sets the counter back. What the other blocks
// wrote before is then seen by reads that pass by the first cache.
ME_INLINE bool me_is_last(const me_uint* counter, int blocks, int tid, bool* said) {
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    const me_uint before = atomicAdd(const_cast<me_uint*>(counter), 1u);
    *said = before == me_uint(blocks - 1);
    if (*said) *const_cast<me_uint*>(counter) = 0u;
  }
  __syncthreads();
  __threadfence();
  return *said;
}
ME_INLINE float me_fresh(const float* p) { return __ldcg(p); }
