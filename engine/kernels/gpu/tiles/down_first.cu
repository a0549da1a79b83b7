ME_UNROLL for (int j = 0; j < held; ++j) ask(j, j);
ME_UNROLL for (int a = 0; a < ME_AHEAD; ++a) ask_scales(a, a);
