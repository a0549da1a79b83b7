// What the shared kernel bodies need from CUDA. The names are those of prelude.metal.
#define ME_INLINE __device__ __forceinline__
#define ME_DEVICE
#define ME_THREAD
#define ME_GROUP
#define ME_UNROLL _Pragma("unroll")
#define ME_PRAGMA(words) _Pragma(#words)
#define ME_UNROLL_BY(n) ME_PRAGMA(unroll n)
// Memory of a whole thread group, which starts at a multiple of 16 bytes.
#define ME_GROUP_ARRAY(T, name, n) __shared__ __align__(16) T name[n];

typedef unsigned int me_uint;

ME_INLINE float me_sum(float v) {
  ME_UNROLL for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
ME_INLINE float me_swap(float v, int d) { return __shfl_xor_sync(0xffffffffu, v, d); }
ME_INLINE int me_swap(int v, int d) { return __shfl_xor_sync(0xffffffffu, v, d); }
ME_INLINE float me_bits(me_uint v) { return __uint_as_float(v); }
ME_INLINE float me_half(me_uint v) { return __half2float(__ushort_as_half((unsigned short)v)); }
ME_INLINE float me_exp(float v) { return expf(v); }
ME_INLINE float me_log(float v) { return logf(v); }
ME_INLINE float me_sqrt(float v) { return sqrtf(v); }
ME_INLINE float me_rsqrt(float v) { return rsqrtf(v); }
ME_INLINE float me_cos(float v) { return cosf(v); }
ME_INLINE float me_sin(float v) { return sinf(v); }
ME_INLINE float me_tanh(float v) { return tanhf(v); }
ME_INLINE float me_erf(float v) { return erff(v); }
ME_INLINE float me_min(float a, float b) { return fminf(a, b); }
ME_INLINE float me_max(float a, float b) { return fmaxf(a, b); }

ME_INLINE void me_barrier() { __syncthreads(); }

template <typename T> ME_INLINE float me_value(T v) { return static_cast<float>(v); }
template <typename T> ME_INLINE void me_set(T* to, float v) { *to = static_cast<T>(v); }

// W words of a row; the rows that a gate accepts start at a multiple of the vector that W allows.
template <int W> ME_INLINE void me_words(const me_uint* p, me_uint (&w)[W + 1]) {
  if (W % 4 == 0) {
    ME_UNROLL for (int i = 0; i + 3 < W; i += 4) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p + i));
      w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
    }
  } else if (W % 2 == 0) {
    ME_UNROLL for (int i = 0; i + 1 < W; i += 2) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(p + i));
      w[i] = v.x, w[i + 1] = v.y;
    }
  } else {
    ME_UNROLL for (int i = 0; i < W; ++i) w[i] = __ldg(p + i);
  }
}

template <typename T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) me_pack { T v[N]; };

// N values as they are. An activation that is a slice may start anywhere.
template <int N, typename T> ME_INLINE me_pack<T, N> me_held(const T* p) {
  if (reinterpret_cast<size_t>(p) % alignof(me_pack<T, N>) == 0) return *reinterpret_cast<const me_pack<T, N>*>(p);
  me_pack<T, N> all;
  ME_UNROLL for (int i = 0; i < N; ++i) all.v[i] = p[i];
  return all;
}
// N values as float32 and their sum.
template <int N, typename T> ME_INLINE float me_load(const T* p, float (&v)[N]) {
  const me_pack<T, N> all = me_held<N>(p);
  float sum = 0.0f;
  ME_UNROLL for (int i = 0; i < N; ++i) sum += v[i] = me_value(all.v[i]);
  return sum;
}

// W words of 16-bit values as they lie, or put together where they may start anywhere.
template <int W, typename T> ME_INLINE me_pack<me_uint, W> me_raw(const T* p) {
  me_pack<me_uint, W> r;
  if (reinterpret_cast<size_t>(p) % alignof(me_pack<me_uint, W>) == 0) {
    r = *reinterpret_cast<const me_pack<me_uint, W>*>(p);
  } else {
    const auto* const h = reinterpret_cast<const unsigned short*>(p);
    ME_UNROLL for (int i = 0; i < W; ++i) r.v[i] = h[2 * i] | me_uint(h[2 * i + 1]) << 16;
  }
  return r;
}

// N values rounded to where a vector may be written.
template <int N, typename T> ME_INLINE void me_store(T* to, const float (&v)[N]) {
  me_pack<T, N> all;
  ME_UNROLL for (int i = 0; i < N; ++i) me_set(&all.v[i], v[i]);
  *reinterpret_cast<me_pack<T, N>*>(to) = all;
}
