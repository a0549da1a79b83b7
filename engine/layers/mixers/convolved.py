"""Compressed convolutional attention: two causal convolutions on queries and keys, half of a value late.

Figliolia et al. 2025 (arXiv 2510.04476), after transformers' ``models/zaya/modeling_zaya.py``. Legend: B
batch, L tokens, D model width, h heads, g key-value heads, d head width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from pydantic import Field

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.conv import make_causal_conv, with_past
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Count, Spec, Width


class ConvolvedOptions(Spec):
    """Options of compressed convolutional attention."""

    heads: Width = Field(description="Query heads.")
    kv_heads: Width = Field(description="Key-value heads.")
    head_dim: Width = Field(description="Width of a head.")
    depthwise: Width = Field(description="Width of the first convolution, of each channel by itself.")
    grouped: Width = Field(description="Width of the second, of each head by itself.")
    bias: Bool = Field(False, description="Biases on the projections.")
    window: Count | None = Field(None, description="Visible tokens, the token itself counted; null for all.")


class ConvolvedProjection(nn.Module):
    """Queries, keys and values of compressed convolutional attention.

    Args:
        spec: the mixer's options.
        width: D.
    """

    def __init__(self, spec: ConvolvedOptions, width: int) -> None:
        super().__init__()
        self._spec, d = spec, spec.head_dim
        heads, kv = spec.heads * d, spec.kv_heads * d
        self.q_proj = nn.Linear(width, heads, bias=spec.bias)
        self.k_proj = nn.Linear(width, kv, bias=spec.bias)
        self.v_proj_current = nn.Linear(width, kv // 2, bias=spec.bias)
        self.v_proj_delayed = nn.Linear(width, kv // 2, bias=spec.bias)
        self.conv_qk_depthwise = make_causal_conv(heads + kv, spec.depthwise, bias=True)
        self.conv_qk_grouped = nn.Conv1d(
            heads + kv, heads + kv, spec.grouped, groups=spec.heads + spec.kv_heads, bias=True
        )

    def __call__(
        self, x: mx.array, mask: mx.array | None, cache: ArraysCache | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """``x`` [B, L, D] to queries [B, L, h, d], keys and values [B, L, g, d]."""
        spec, L = self._spec, x.shape[1]
        if mask is not None:
            x = mx.where(mask[..., None], x, 0)
        q, k = self.q_proj(x), self.k_proj(x)
        keep = spec.depthwise + spec.grouped - 2
        mixed = with_past(mx.concatenate([q, k], axis=-1), keep, mask, cache, 0)
        mixed = self.conv_qk_grouped(self.conv_qk_depthwise(mixed))
        own_q = mx.unflatten(q, -1, (spec.kv_heads, -1, spec.head_dim))
        own_k = mx.unflatten(k, -1, (spec.kv_heads, 1, spec.head_dim))
        own_q = (own_q + own_k) * 0.5
        mixed_q, mixed_k = mx.split(mixed, [q.shape[-1]], axis=-1)
        q = mx.unflatten(mixed_q, -1, (spec.heads, -1)) + own_q.flatten(-3, -2)
        k = mx.unflatten(mixed_k, -1, (spec.kv_heads, -1)) + own_q.mean(axis=-2)
        late = self.v_proj_delayed(with_past(x, 1, mask, cache, 1)[:, :L])
        v = mx.concatenate([self.v_proj_current(x), late], axis=-1)
        return q, k, mx.unflatten(v, -1, (spec.kv_heads, -1))


class KeyTemperature(nn.Module):
    """A learned factor on the keys of each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.temp = mx.zeros((heads,))


class ConvolvedAttention(Mixer):
    """Compressed convolutional attention; queries and keys have the length ``sqrt(d)``, keys times a factor.

    Args:
        layer: the layer's plan; the mixer's options are :class:`ConvolvedOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: the query heads cannot be divided among the key-value heads, or the values into halves.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(ConvolvedOptions, layer, "compressed convolutional attention")
        problem = "the query heads cannot be divided among the key-value heads"
        check_parts(spec.heads, spec.kv_heads, problem, layer.index)
        check_parts(spec.kv_heads * spec.head_dim, 2, "the values cannot be halved", layer.index)
        self.scale = spec.head_dim**-0.5
        self.qkv_proj = ConvolvedProjection(spec, layer.sizes.hidden_size)
        self.qk_norm = KeyTemperature(spec.kv_heads)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, layer.sizes.hidden_size, bias=spec.bias)
        rope = layer.rope
        self._rope = Rope(rope, rope.width(spec.head_dim), spec.head_dim) if rope is not None else None

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        own, convs = (None, None) if cache is None else (cache[0], cache[1])
        offset = own.offset + 0 if own is not None else 0
        q, k, v = self.qkv_proj(x, state.recurrent_mask(x, convs), convs)
        if convs is not None:
            convs.advance(x.shape[1])
        q, k = self._lengthened(q), self._lengthened(k) * self.qk_norm.temp[:, None].astype(k.dtype)
        q, k, v = (t.swapaxes(1, 2) for t in (q, k, v))
        if self._rope is not None:
            q, k = self._rope(q, offset), self._rope(k, offset)
        mask = state.attention_mask(x, own, self._spec.window or None)
        if own is not None:
            k, v = own.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=own, scale=self.scale, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).flatten(-2))

    def _lengthened(self, t: mx.array) -> mx.array:
        """Vectors in the last axis at the length ``sqrt(d)``."""
        norm = mx.sqrt(t.astype(mx.float32).square().sum(axis=-1, keepdims=True)).astype(t.dtype)
        return t * (self._spec.head_dim**0.5 / mx.maximum(norm, mx.finfo(t.dtype).eps))

    def make_cache(self) -> CacheList:
        """Keys and values, and what the convolutions and the late values need of the tokens before."""
        window = self._spec.window
        return CacheList(RotatingKVCache(window, keep=0) if window else KVCache(), ArraysCache(size=2))


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `convolved`."""
    return {"convolved": ConvolvedAttention}
