// The product of a chunk of each row, as the codec before this decodes it, with fragments of x.
// The fragment of 8 codes from 4 neighbouring inputs in pairs, and 16 times the 4.
ME_INLINE uint4 me_fragment(const me_uint (&p)[2]) {
  const me_uint even = __byte_perm(p[0], p[1], 0x5410), odd = __byte_perm(p[0], p[1], 0x7632);
  return {even, me_times(even, 16.0f), odd, me_times(odd, 16.0f)};
}

// 16 rows (low: g, high: g + 8) by 128 codes, into two sums that do not wait for each other.
ME_INLINE void me_step(const me_chunk& low, const me_chunk& high, const uint4* x, float (&c)[4], float (&d)[4]) {
  ME_UNROLL for (int j = 0; j < 4; ++j) {
    const uint4 f = x[j * 4];
    float(&first)[4] = ME_PARTS == 2 && j >= 2 ? d : c;
    float(&second)[4] = ME_PARTS == 2 && j < 2 ? c : d;
    ME_UNROLL for (int p = 0; p < ME_PIECES; ++p) {
      me_mma(first, me_pair(low, j, 0, p), me_pair(high, j, 0, p), me_pair(low, j, 1, p), me_pair(high, j, 1, p),
             f.x, f.y);
      me_mma(second, me_pair(low, j, 2, p), me_pair(high, j, 2, p), me_pair(low, j, 3, p), me_pair(high, j, 3, p),
             f.z, f.w);
    }
  }
}
