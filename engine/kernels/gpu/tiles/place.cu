// Where vector v lies, so that the four lanes of a row read 64 bytes in a row.
ME_INLINE int me_place(int v) { return (v & ~15) + (v & 3) * 4 + (v >> 2 & 3); }
// The fragment of 8 neighbouring inputs in pairs.
ME_INLINE uint4 me_fragment(const me_uint (&p)[4]) {
  return {__byte_perm(p[0], p[2], 0x5410), __byte_perm(p[0], p[2], 0x7632), __byte_perm(p[1], p[3], 0x5410),
          __byte_perm(p[1], p[3], 0x7632)};
}
