extern __shared__ uint4 me_shared[];
asked = true;
if (group >= ME_DOWN_BLOCKS) return;
const int h0 = group * ME_TILES * 16;
