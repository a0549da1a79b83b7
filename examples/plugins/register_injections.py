"""Something added to the stream before a layer: an embedding of the token before each one.

The decoder layer `residual` has a place for it, under `inject`. Its cache keeps the last token.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_experts.engine.layers.base_mixer import Piece
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_injection
architectures: [ExampleInjectionForCausalLM]
reference: examples/plugins/register_injections.py
attention: {rope: half}
block:
  kind: residual
  options:
    residual: {kind: plain}
    inject: {kind: previous_token, path: previous, layers: [1]}
moe:
  router: {score: softmax, renormalize: true}
head: {tied: false}
"""


class PreviousToken(Piece):
    def __init__(self, layer: Any, plan: Any, spec: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(layer.sizes.vocab_size, layer.sizes.hidden_size)

    def __call__(self, stream: mx.array, state: Any, cache: Any = None) -> mx.array:
        ids, mask = state.inputs, state.recurrent_mask(stream, cache)
        # Padding counts as token 0, which also stands before the first token.
        ids = ids if mask is None else mx.where(mask, ids, 0)
        first = mx.zeros_like(ids[:, :1]) if cache is None or cache[0] is None else cache[0]
        if cache is not None:
            cache[0] = ids[:, -1:]
            cache.advance(ids.shape[1])
        return self.table(mx.concatenate([first, ids[:, :-1]], axis=1))

    def make_cache(self) -> ArraysCache:
        return ArraysCache(size=1)


@hookimpl
def register_injections() -> dict[str, Any]:
    return {"previous_token": PreviousToken}
