"""Attention whose queries and values are scaled for each head by the token and its position.

Legend: B batch, L tokens, D model width, h heads, d head width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from pydantic import Field

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import place
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Spec, Width


class TemperedOptions(Spec):
    """Options of attention with temperatures."""

    heads: Width = Field(description="Query heads.")
    kv_heads: Width = Field(description="Key-value heads.")
    head_dim: Width = Field(description="Width of a head.")
    bias: Bool = Field(description="Biases on both projections.")


class TemperedAttention(Mixer):
    """``q * t_q`` and ``v * t_v``, ``t = tanh(w gelu(qkv)) + 1/2 + sigmoid(a log(position + 1))``.

    After vLLM's ``model_executor/models/moondream3.py``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`TemperedOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: queries and values have different numbers of heads.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(TemperedOptions, layer, "attention with temperatures")
        problem = "temperatures are for as many value heads as there are query heads"
        check_parts(spec.kv_heads, spec.heads, problem, layer.index)
        check_parts(spec.heads, spec.kv_heads, problem, layer.index)
        width, d, rope = layer.sizes.hidden_size, spec.head_dim, layer.rope
        inner = (spec.heads + 2 * spec.kv_heads) * d
        self.qkv = nn.Linear(width, inner, bias=spec.bias)
        self.proj = nn.Linear(spec.heads * d, width, bias=spec.bias)
        for leaf in ("tau.wq", "tau.wv"):
            place(self, leaf, mx.zeros((spec.heads, inner)))
        place(self, "tau.alpha", mx.zeros((spec.heads,)))
        self.scale = d**-0.5
        self._rope = Rope(rope, rope.width(d), d) if rope is not None else None

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        spec, (B, L, _) = self._spec, x.shape
        offset = cache.offset + 0 if cache is not None else 0
        qkv, tau = self.qkv(x), self["tau"]
        hidden = nn.gelu(qkv)
        ends = spec.heads * spec.head_dim, (spec.heads + spec.kv_heads) * spec.head_dim
        q, k, v = (
            mx.unflatten(t, -1, (-1, spec.head_dim)).swapaxes(1, 2) for t in mx.split(qkv, ends, axis=-1)
        )
        steps = mx.arange(L)
        places = (
            offset[:, None] + steps
            if isinstance(offset, mx.array) and offset.ndim
            else (offset + steps)[None]
        )
        logs = mx.log(places.astype(mx.float32) + 1.0)[:, None]
        late = 0.5 + mx.sigmoid(tau["alpha"].astype(mx.float32)[:, None] * logs)
        q, v = (
            t * (mx.tanh(hidden @ w.T).swapaxes(1, 2) + late.astype(x.dtype))[..., None]
            for t, w in ((q, tau["wq"]), (v, tau["wv"]))
        )
        if self._rope is not None:
            q, k = self._rope(q, offset), self._rope(k, offset)
        mask = state.attention_mask(x, cache)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.proj(out.swapaxes(1, 2).reshape(B, L, -1))

    def make_cache(self) -> KVCache:
        """Keys and values."""
        return KVCache()


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `tempered`."""
    return {"tempered": TemperedAttention}
