// After a block's logits are written: the last block has all of them, and its first warp selects.
ME_GROUP_ARRAY(bool, said, 1)
if (!me_is_last(counter, ME_BLOCKS, tid, said) || warp > 0) return;
