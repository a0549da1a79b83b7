// What the shared kernel bodies need from Metal. The names are those of prelude.cu.
#define ME_INLINE inline
#define ME_DEVICE device
#define ME_THREAD thread
#define ME_GROUP threadgroup
#define ME_UNROLL _Pragma("clang loop unroll(full)")
#define ME_PRAGMA(words) _Pragma(#words)
#define ME_UNROLL_BY(n) ME_PRAGMA(clang loop unroll_count(n))
// Memory of a whole thread group, which starts at a multiple of 16 bytes.
#define ME_GROUP_ARRAY(T, name, n) alignas(16) threadgroup T name[n];

typedef uint me_uint;

template <typename T> ME_INLINE float me_value(T v) { return static_cast<float>(v); }

ME_INLINE float me_sum(float v) { return simd_sum(v); }
ME_INLINE float me_swap(float v, int d) { return simd_shuffle_xor(v, ushort(d)); }
ME_INLINE int me_swap(int v, int d) { return simd_shuffle_xor(v, ushort(d)); }
ME_INLINE float me_bits(me_uint v) { return as_type<float>(v); }
ME_INLINE float me_half(me_uint v) { return me_value(as_type<half>(ushort(v))); }
// MLX builds kernels with fast mathematics, where an infinity may be taken for granted not to happen.
ME_INLINE float me_exp(float v) { return metal::exp(v > 88.0f ? 88.0f : v); }
ME_INLINE float me_log(float v) { return metal::log(v); }
ME_INLINE float me_sqrt(float v) { return metal::sqrt(v); }
ME_INLINE float me_rsqrt(float v) { return metal::precise::rsqrt(v); }
// The fast forms lose the angle at positions in the thousands.
ME_INLINE float me_cos(float v) { return metal::precise::cos(v); }
ME_INLINE float me_sin(float v) { return metal::precise::sin(v); }
ME_INLINE void me_barrier() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }
// The fast form is NaN for large arguments.
ME_INLINE float me_tanh(float v) { return metal::precise::tanh(v); }
ME_INLINE float me_min(float a, float b) { return metal::min(a, b); }
ME_INLINE float me_max(float a, float b) { return metal::max(a, b); }
// Metal has no erf. Rational approximation 7.1.26 of Abramowitz and Stegun, absolute error under 1.5e-7.
ME_INLINE float me_erf(float v) {
  const float a = metal::abs(v);
  const float t = 1.0f / (1.0f + 0.3275911f * a);
  const float p =
      ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  const float r = 1.0f - p * metal::exp(-a * a);
  return v < 0.0f ? -r : r;
}

template <typename T> ME_INLINE void me_set(device T* to, float v) { *to = static_cast<T>(v); }

template <int W> ME_INLINE void me_words(device const me_uint* p, thread me_uint (&w)[W + 1]) {
  ME_UNROLL for (int i = 0; i < W; ++i) w[i] = p[i];
}

template <int N, typename T> ME_INLINE float me_load(device const T* p, thread float (&v)[N]) {
  float sum = 0.0f;
  ME_UNROLL for (int i = 0; i < N; ++i) sum += v[i] = me_value(p[i]);
  return sum;
}

template <int N, typename T> ME_INLINE void me_store(device T* to, thread const float (&v)[N]) {
  ME_UNROLL for (int i = 0; i < N; ++i) me_set(to + i, v[i]);
}
