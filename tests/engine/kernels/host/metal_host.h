// Stands in for the Metal standard library. Address spaces are real types: a pointer that loses its own does not
// compile, as on Metal.
#include "fibers.h"

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
  memcpy(&r, &v, sizeof(T));
  return r;
}

namespace metal {
inline float exp(float v) { return ::expf(v); }
inline float log(float v) { return ::logf(v); }
inline float sqrt(float v) { return ::sqrtf(v); }
inline float abs(float v) { return ::fabsf(v); }
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { host::wait_group(); }
namespace precise {
inline float rsqrt(float v) { return 1.0f / ::sqrtf(v); }
inline float cos(float v) { return ::cosf(v); }
inline float sin(float v) { return ::sinf(v); }
inline float tanh(float v) { return ::tanhf(v); }
}
}  // namespace metal

inline float simd_sum(float v) {
  const uint32_t mine = host::bits_of(v);
  const host::Slot* slots = host::exchange(&mine, 1);
  float sum = 0.0f;
  for (int i = 0; i < 32; ++i) sum += host::float_of(slots[i].word[0]);
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
