// A group takes one head: its values into ys, and the factor of a norm that spans all heads.
ME_GROUP_ARRAY(float, ys, ME_D)
ME_GROUP_ARRAY(float, red, ME_WARPS)
const int tid = warp * 32 + lane;
ME_HEADS
