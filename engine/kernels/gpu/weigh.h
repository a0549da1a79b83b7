// The sigmoid of the shared expert's gate, by one warp, into the word after every value of act.
const int64_t at = 0;
float g = 0.0f;
for (int c = lane; c < ME_H / ME_WEIGH_CHUNK; c += 32) {
  float v[ME_WEIGH_CHUNK];
  const float sum = me_load<ME_WEIGH_CHUNK>(x + c * ME_WEIGH_CHUNK, v);
  g += ME_DOT_WEIGH;
}
g = me_sum(g);
if (lane == 0) ME_LEAVE(ME_WEIGH_AT, 1.0f / (1.0f + me_exp(-ME_END_WEIGH)));
