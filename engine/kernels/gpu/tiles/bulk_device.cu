// Copies of whole rows to shared memory by the copy engine of sm_90 and later: tests replace this file.
ME_INLINE me_uint me_near(const void* p) { return static_cast<me_uint>(__cvta_generic_to_shared(p)); }
// A word for copies to report to, which one thread gets ready before any other sees it.
ME_INLINE void me_full_begin(uint64_t* full) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(me_near(full)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// So many bytes are to come.
ME_INLINE void me_full_expect(uint64_t* full, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(me_near(full)), "r"(bytes) : "memory");
}
ME_INLINE void me_full_copy(void* to, const void* from, int bytes, uint64_t* full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   me_near(to)),
               "l"(from), "r"(bytes), "r"(me_near(full))
               : "memory");
}
// Waits for all that was expected; the parity is 0 the first time and changes with each.
ME_INLINE void me_full_wait(uint64_t* full, int parity) {
  me_uint done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(me_near(full)), "r"(parity)
                 : "memory");
  }
}
