// Stands in for CUDA, tensor cores and asynchronous copies included (in place of tensor.cu).
#include "fibers.h"

#define __device__
#define __global__
#define __shared__
#define __align__(n) alignas(n)
#define __forceinline__ inline
#define threadIdx (host::Index{unsigned(host::current)})
#define blockIdx (host::Index{unsigned(host::group)})
#define gridDim (host::Index{unsigned(host::groups)})

namespace host {
struct Index {
  unsigned x;
};
}  // namespace host

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float v) : bits(host::to_bfloat(v)) {}
  operator float() const { return host::from_bfloat(bits); }
};
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float v) : bits(host::to_half(v)) {}
  operator float() const { return host::from_half(bits); }
};
inline __half __ushort_as_half(unsigned short v) {
  __half h;
  h.bits = v;
  return h;
}
inline float __half2float(__half v) { return v; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
template <typename T> T min(T a, T b) { return b < a ? b : a; }
template <typename T> T max(T a, T b) { return a < b ? b : a; }
inline float __uint_as_float(unsigned v) { return host::float_of(v); }
inline unsigned __float_as_uint(float v) { return host::bits_of(v); }
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __shfl_xor_sync(unsigned, T v, int d) { return host::from_lane(v, host::lane() ^ d); }
template <typename T> T __shfl_sync(unsigned, T v, int from) { return host::from_lane(v, from); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned how) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(bytes >> (how >> i * 4 & 7) * 8 & 255) << i * 8;
  return r;
}
inline void __syncthreads() { host::wait_group(); }
inline int __syncthreads_or(int v) {
  static int any;
  host::wait_group();
  any = 0;
  host::wait_group();
  any |= v;
  host::wait_group();
  return any;
}
inline void __syncwarp() { host::wait_warp(); }

// In place of pieces/device.cu; groups run one after another.
inline void me_ask(const void*, int, int) {}
inline bool me_is_last(const unsigned* counter, int blocks, int tid, bool* said) {
  host::wait_group();
  if (tid == 0) {
    *said = *counter == unsigned(blocks - 1);
    *const_cast<unsigned*>(counter) = *said ? 0 : *counter + 1;
  }
  host::wait_group();
  return *said;
}
inline float me_fresh(const float* p) { return *p; }
inline uint4 me_fresh(const uint4* p) { return *p; }
// In place of bulk_device.cu.
inline void me_full_begin(uint64_t* full) { host::full_begin(full); }
inline void me_full_expect(uint64_t* full, int bytes) { host::full_expect(full, bytes); }
inline void me_full_copy(void* to, const void* from, int bytes, uint64_t* full) {
  host::full_copy(to, from, bytes, full);
}
inline void me_full_wait(uint64_t* full, int parity) { host::full_wait(full, parity); }
// In place of one_device.cu.
inline void me_leave_word(float* to, unsigned bits) { *to = host::float_of(bits); }
inline unsigned __ballot_sync(unsigned, bool v) {
  unsigned lanes = unsigned(v) << host::lane();
  for (int d = 1; d < 32; d *= 2) lanes |= host::from_lane(lanes, host::lane() ^ d);
  return lanes;
}
inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }

inline unsigned me_bfloat(float v) { return host::to_bfloat(v); }
inline unsigned me_bfloats(float low, float high) {
  return host::to_bfloat(low) | unsigned(host::to_bfloat(high)) << 16;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
template <unsigned MASK> unsigned me_nibbles(unsigned w) { return (w & MASK) | 0x43004300u; }
inline void me_copy(uint4* to, const void* from, bool there) { host::copy(to, from, there); }
inline void me_commit() { host::commit(); }
template <int N> void me_wait() { host::wait_copies(N); }
inline uint4 me_stream(const void* p) { return *static_cast<const uint4*>(p); }
inline void me_mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  host::multiply(c, a0, a1, a2, a3, b0, b1);
}
inline void me_mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  host::multiply(c, a0, a1, a2, a3, b0, b1);
}
namespace mlx::core::cu {
inline uint4 me_shared[1 << 14];
}
