"""A mixer that owns tensors: each token gets the mean of the values up to it.

The attributes of the module are the tensors' names below the mixer's path, `self_attn.v_proj.weight` here, so
they must be those of the checkpoint. Leaves that a dtype cast must leave alone stand in `float32_leaves`.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_mixer
architectures: [ExampleMixerForCausalLM]
reference: examples/plugins/register_mixers.py
attention: {kind: running_mean}
moe:
  router: {score: softmax, renormalize: true}
head: {tied: false}
"""


class RunningMean(Mixer):
    def __init__(self, layer: Any, plan: Any) -> None:
        super().__init__()
        width = layer.sizes.hidden_size
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, state: Any, cache: Any = None) -> mx.array:
        values = self.v_proj(x).astype(mx.float32)
        # Which positions of a padded batch are real; None where all are.
        mask = state.recurrent_mask(x, cache)
        real = mx.ones(x.shape[:2]) if mask is None else mask.astype(mx.float32)
        total, count = mx.cumsum(values * real[..., None], axis=1), mx.cumsum(real, axis=1)
        if cache is not None:
            if cache[0] is not None:
                total, count = total + cache[0], count + cache[1]
            cache[0], cache[1] = total[:, -1:], count[:, -1:]
            cache.advance(x.shape[1])
        return self.o_proj((total / mx.maximum(count, 1.0)[..., None]).astype(x.dtype))

    def make_cache(self) -> ArraysCache:
        return ArraysCache(size=2)


@hookimpl
def register_mixers() -> dict[str, Any]:
    return {"running_mean": RunningMean}
