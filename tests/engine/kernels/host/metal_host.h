// Stands in for the Metal standard library. Address spaces are real types: a pointer that loses its own does not
// compile, as on Metal.
#include "fibers.h"
#include <cmath>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

typedef unsigned int uint;
typedef unsigned short ushort;
// Enumerations: scalars that can be read through any address space, and that are no number by themselves.
enum class bfloat16_t : uint16_t {};
enum class half : uint16_t {};
typedef half float16_t;

template <typename T, typename U> T as_type(U v) {
  static_assert(sizeof(T) == sizeof(U));
  T r;
  std::memcpy(&r, &v, sizeof(T));
  return r;
}

namespace metal {
inline float exp(float v) { return std::exp(v); }
inline float log(float v) { return std::log(v); }
inline float sqrt(float v) { return std::sqrt(v); }
inline float abs(float v) { return std::fabs(v); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { host::wait_group(); }
namespace precise {
inline float rsqrt(float v) { return 1.0f / std::sqrt(v); }
inline float cos(float v) { return std::cos(v); }
inline float sin(float v) { return std::sin(v); }
inline float tanh(float v) { return std::tanh(v); }
}
}  // namespace metal

inline float simd_sum(float v) {
  auto& slots = host::warps[host::warp()].slot;
  slots[host::lane()][0] = host::bits_of(v);
  host::wait_warp();
  float sum = 0.0f;
  for (int i = 0; i < 32; ++i) sum += host::float_of(slots[i][0]);
  host::wait_warp();
  return sum;
}
template <typename T> T simd_shuffle_xor(T v, ushort d) { return host::from_lane(v, host::lane() ^ d); }

inline float me_value(bfloat16_t v) { return host::from_bfloat(uint16_t(v)); }
inline float me_value(half v) { return host::from_half(uint16_t(v)); }
inline void me_set(device bfloat16_t* to, float v) { *to = bfloat16_t(host::to_bfloat(v)); }
inline void me_set(device half* to, float v) { *to = half(host::to_half(v)); }

struct uint3 {
  uint x, y, z;
};
