"""Attention whose query and output projections are experts (mixture of attention heads).

Zhang et al. 2022, after transformers' ``models/jetmoe/modeling_jetmoe.py``. Legend: B batch, L tokens, D
model width, E experts, K experts a token picks, g key-value heads, d head width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.switch_layers import SwitchLinear
from pydantic import Field

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import place
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Spec, Width


class RoutedOptions(Spec):
    """Options of attention with experts for queries and output."""

    kv_heads: Width = Field(description="Key-value heads; each expert has as many query heads.")
    head_dim: Width = Field(description="Width of a head.")
    experts: Width = Field(description="Experts.")
    top_k: Width = Field(description="Experts that a token picks.")


class ProjectionExperts(nn.Module):
    """The router, the experts of both projections, and a bias on their sum."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        place(self, "router.layer", nn.Linear(width, experts, bias=False))
        self.input_linear = SwitchLinear(width, inner, experts, bias=False)
        self.output_linear = SwitchLinear(inner, width, experts, bias=False)
        self.bias = mx.zeros((width,))


class RoutedAttention(Mixer):
    """Each token's queries are those of K experts, over keys and values that all experts share.

    Args:
        layer: the layer's plan; the mixer's options are :class:`RoutedOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: a token picks more experts than there are.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(RoutedOptions, layer, "attention with experts")
        if spec.top_k > spec.experts:
            raise ConfigError(
                "a token cannot pick that many experts",
                where="config.json",
                expected=f"1 to {spec.experts} experts a token",
                found=str(spec.top_k),
            )
        width, inner = layer.sizes.hidden_size, spec.kv_heads * spec.head_dim
        self.experts = ProjectionExperts(width, inner, spec.experts)
        self.kv_proj = nn.Linear(width, 2 * inner, bias=False)
        self.scale = spec.head_dim**-0.5
        rope = layer.rope
        self._rope = Rope(rope, rope.width(spec.head_dim), spec.head_dim) if rope is not None else None

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        spec, (B, L, _) = self._spec, x.shape
        offset = cache.offset + 0 if cache is not None else 0
        logits = self.experts.router.layer(x).astype(mx.float32)
        picked = mx.stop_gradient(mx.argpartition(-logits, kth=spec.top_k - 1, axis=-1)[..., : spec.top_k])
        weights = mx.softmax(mx.take_along_axis(logits, picked, axis=-1), axis=-1)
        q = picked_product(self.experts.input_linear, x[..., None, None, :], picked)[..., 0, :]
        # Query heads of one key-value head stand together: [B, g * K, L, d].
        q = q.reshape(B, L, spec.top_k, spec.kv_heads, spec.head_dim).transpose(0, 3, 2, 1, 4).flatten(1, 2)
        k, v = (
            mx.unflatten(t, -1, (spec.kv_heads, -1)).swapaxes(1, 2)
            for t in mx.split(self.kv_proj(x), 2, axis=-1)
        )
        if self._rope is not None:
            q, k = self._rope(q, offset), self._rope(k, offset)
        mask = state.attention_mask(x, cache)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        out = mx.unflatten(out, 1, (spec.kv_heads, spec.top_k)).transpose(0, 3, 2, 1, 4).flatten(-2)
        out = picked_product(self.experts.output_linear, out[..., None, :], picked)[..., 0, :]
        total = (out.astype(mx.float32) * weights[..., None]).sum(axis=-2)
        return (total + self.experts.bias.astype(mx.float32)).astype(x.dtype)

    def make_cache(self) -> KVCache:
        """Keys and values."""
        return KVCache()


def picked_product(module: nn.Module, rows: mx.array, picked: mx.array) -> mx.array:
    """Rows [..., 1, w] through the picked matrices; in float32 on the CPU, where MLX has no other product."""
    if mx.default_device().type == mx.DeviceType.gpu or rows.dtype == mx.float32:
        y: mx.array = module(rows, picked)
        return y
    if "scales" in module:
        return module(rows.astype(mx.float32), picked).astype(rows.dtype)
    weight = module["weight"].astype(mx.float32).swapaxes(-1, -2)
    wide = mx.gather_mm(rows.astype(mx.float32), weight, rhs_indices=picked)
    return wide.astype(rows.dtype)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `routed`."""
    return {"routed": RoutedAttention}
