// Tensor-core form: 16 rows by 128 codes a step. A lane has 32 neighbouring codes of a row ("chunk").
// A warp sums over ME_UNIT steps at once. Column n of the product belongs to scale group n % ME_GROUPS of the
// unit and to the high (n < ME_GROUPS) or low parts of x: a lane feeds x to the one column that is its inputs',
// and zeros to the others, so every group has its own sum.
struct me_chunk { me_uint w[ME_BITS]; };
constexpr int ME_GROUPS = ME_UNIT * 128 / ME_SPAN;

ME_INLINE me_chunk me_take(const char* p) {
  me_chunk c;
  if (ME_BITS % 4 == 0) {
    ME_UNROLL for (int i = 0; i + 3 < ME_BITS; i += 4) {
      const uint4 v = me_stream(p + i * 4);
      c.w[i] = v.x, c.w[i + 1] = v.y, c.w[i + 2] = v.z, c.w[i + 3] = v.w;
    }
  } else if (ME_BITS % 2 == 0) {
    ME_UNROLL for (int i = 0; i + 1 < ME_BITS; i += 2) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(p) + i / 2);
      c.w[i] = v.x, c.w[i + 1] = v.y;
    }
  } else {
    ME_UNROLL for (int i = 0; i < ME_BITS; ++i) c.w[i] = __ldg(reinterpret_cast<const me_uint*>(p) + i);
  }
  return c;
}
ME_INLINE me_chunk me_no_chunk() {
  me_chunk c;
  ME_UNROLL for (int i = 0; i < ME_BITS; ++i) c.w[i] = 0;
  return c;
}
// A chunk, or zeros past the row's end.
ME_INLINE me_chunk me_take(const char* p, bool there) { return there ? me_take(p) : me_no_chunk(); }
// The same from shared memory.
ME_INLINE me_chunk me_take_near(const char* p, bool there) {
  constexpr int at_once = ME_BITS % 4 == 0 ? 4 : ME_BITS % 2 == 0 ? 2 : 1;
  if (!there) return me_no_chunk();
  me_chunk c;
  ME_UNROLL for (int i = 0; i < ME_BITS; i += at_once) {
    const auto v = *reinterpret_cast<const me_pack<me_uint, at_once>*>(p + i * 4);
    ME_UNROLL for (int n = 0; n < at_once; ++n) c.w[i + n] = v.v[n];
  }
  return c;
}

// v as bfloat16 parts: the high one in the low 16 bits, the low one in the high 16 bits.
ME_INLINE me_uint me_split(float v) {
  const me_uint high = me_bfloat(v);
  return high | me_bfloat(v - me_bits(high << 16)) << 16;
}
// Both halves of a pair times a power of two.
ME_INLINE me_uint me_times(me_uint pair, float by) {
  return me_bfloat(by * me_bits(pair << 16)) | me_bfloat(by * me_bits(pair & 0xFFFF0000u)) << 16;
}
