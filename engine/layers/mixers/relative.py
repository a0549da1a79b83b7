"""Attention whose positions are a learned bias by distance, with short convolutions on keys and values.

The sources are transformers' ``models/inkling/modeling_inkling.py`` and
``models/inkling2/modeling_inkling2.py``. Legend: B batch, L tokens, T cached tokens, D model width, h
heads, g key-value heads, d head width, R width of a relative state, E distances that have a bias.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache
from pydantic import Field

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.conv import DynamicConv, ResidualConv
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Count, NotNegative, Num, Positive, Spec, Width


class LogScaleOptions(Spec):
    """A factor on queries and biases, ``1 + alpha * log(max((position + 1) / floor, 1))``."""

    alpha: Num = Field(description="Factor on the logarithm.")
    floor: NotNegative = Field(description="Positions up to which the factor is 1; 0 for no factor at all.")


class RelativeOptions(Spec):
    """Options of attention with a bias by distance."""

    heads: Width = Field(description="Query heads.")
    kv_heads: Width = Field(description="Key-value heads.")
    head_dim: Width = Field(description="Width of a head.")
    window: Count | None = Field(None, description="Visible tokens, the token itself counted; null for all.")
    extent: Width = Field(description="Distances, from 0, that have a bias.")
    relative_dim: Width = Field(description="Width of a relative state of a head.")
    kernel: Width = Field(description="Width of the convolutions on keys and values.")
    normalization: Literal["rms", "clip"] = Field(
        description="Queries and keys are RMS-normalised with weights and scaled by 1 / d; or they are "
        "shortened to a length, and values normalised without weights."
    )
    clip: Positive = Field(1.0, description="That length for queries and keys.")
    relative_clip: Positive = Field(1.0, description="That length for relative states.")
    log_scale: LogScaleOptions | None = Field(None, description="Factor by the position.")
    dynamic: bool = Field(False, description="Taps of the convolutions are given by each token.")
    sinks: bool = Field(False, description="Each query has a sink logit, projected from its token.")
    gate: Bool = Field(False, description="The output has a sigmoid gate for each element.")


class LearnedClip(nn.Module):
    """Vectors times a learned scale, shortened to a length where they are longer."""

    def __init__(self, heads: int, dim: int, length: float) -> None:
        super().__init__()
        self.scale = mx.ones((heads, dim))
        self._length = length

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [B, L, h, d] to [B, L, h, d], in float32."""
        return shortened(x.astype(mx.float32) * self.scale.astype(mx.float32), self._length)


def shortened(x: mx.array, length: float) -> mx.array:
    """Vectors in the last axis scaled down to a length where they are longer, in float32."""
    x = x.astype(mx.float32)
    norm = mx.sqrt(x.square().sum(axis=-1, keepdims=True))
    return x * mx.minimum(length / (norm + 1e-6), 1.0)


class RelativeAttention(Mixer):
    """Attention without rotation; query, key and value may read inputs of their own.

    Args:
        layer: the layer's plan; the mixer's options are :class:`RelativeOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: the query heads cannot be divided among the key-value heads.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("static_weight",)
    takes_three = True

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(RelativeOptions, layer, "attention with a bias by distance")
        problem = "the query heads cannot be divided among the key-value heads"
        check_parts(spec.heads, spec.kv_heads, problem, layer.index)
        width, eps, d = layer.sizes.hidden_size, layer.sizes.norm_eps, spec.head_dim
        self._eps = eps
        self.scale = 1.0 / d if spec.normalization == "rms" else d**-0.5
        channels = spec.kv_heads * d
        self.q_proj = nn.Linear(width, spec.heads * d, bias=False)
        self.k_proj = nn.Linear(width, channels, bias=False)
        self.v_proj = nn.Linear(width, channels, bias=False)
        self.r_proj = nn.Linear(width, spec.heads * spec.relative_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * d, width, bias=False)
        for name in ("k_sconv", "v_sconv"):
            self[name] = (
                DynamicConv(channels, spec.kv_heads, spec.kernel, width)
                if spec.dynamic
                else ResidualConv(channels, spec.kernel, scaled=spec.normalization == "clip")
            )
        if spec.normalization == "rms":
            self.q_norm, self.k_norm = nn.RMSNorm(d, eps=eps), nn.RMSNorm(d, eps=eps)
        else:
            self.q_clip = LearnedClip(spec.heads, d, spec.clip)
            self.r_clip = LearnedClip(spec.heads, spec.relative_dim, spec.relative_clip)
        place(self, "rel_logits_proj.proj", mx.zeros((spec.relative_dim, spec.extent)))
        if spec.sinks:
            self.sink_proj = nn.Linear(width, spec.heads, bias=False)
        if spec.gate:
            self.gate_proj = nn.Linear(width, spec.heads * d, bias=False)

    def __call__(self, x: Any, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D], or one such array for query, key and value, to [B, L, D]; extends ``cache``."""
        spec = self._spec
        x, x_k, x_v = x if isinstance(x, tuple) else (x, x, x)
        L = x.shape[1]
        own, convs = (None, None) if cache is None else (cache[0], cache[1])
        real = state.recurrent_mask(x, convs)
        offset = own.offset + 0 if own is not None else 0
        clips = spec.normalization == "clip"
        q = mx.unflatten(self.q_proj(x), -1, (spec.heads, -1))
        q = self.q_clip(q).astype(x.dtype) if clips else self.q_norm(q)
        k = mx.unflatten(self._convolved("k", x_k, real, convs, 0), -1, (spec.kv_heads, -1))
        k = shortened(k, spec.clip).astype(x.dtype) if clips else self.k_norm(k)
        v = mx.unflatten(self._convolved("v", x_v, real, convs, 1), -1, (spec.kv_heads, -1))
        v = mx.fast.rms_norm(v, None, self._eps) if clips else v
        r = mx.unflatten(self.r_proj(x), -1, (spec.heads, -1))
        r = self.r_clip(r).astype(x.dtype) if clips else r
        if convs is not None:
            convs.advance(L)
        factor = self._log_scale(offset, L)
        if factor is not None:
            q, r = ((t.astype(mx.float32) * factor).astype(x.dtype) for t in (q, r))
        q, k, v = (t.swapaxes(1, 2) for t in (q, k, v))
        mask = state.attention_mask(x, own, spec.window or None, as_array=True)
        if own is not None:
            k, v = own.update_and_fetch(k, v)
        bias = self._bias(r, distances(own, L, k.shape[2]))
        if mask is not None:
            bias = mx.where(mask, bias, mx.array(mx.finfo(bias.dtype).min, bias.dtype))
        if spec.sinks:
            sinks = self.sink_proj(x).swapaxes(1, 2)[..., None]
            out = attend_with_sinks(q, k, v, self.scale, bias, sinks)
        else:
            out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=bias)
        out = out.swapaxes(1, 2).flatten(-2)
        if spec.gate:
            gate = mx.sigmoid(self.gate_proj(x).astype(mx.float32))
            out = (out.astype(mx.float32) * gate).astype(out.dtype)
        return self.o_proj(out)

    def _convolved(self, name: str, x: mx.array, real: mx.array | None, cache: Any, slot: int) -> mx.array:
        y, conv = self[f"{name}_proj"](x), self[f"{name}_sconv"]
        return conv(y, x, real, cache, slot) if self._spec.dynamic else conv(y, real, cache, slot)

    def _log_scale(self, offset: Any, length: int) -> mx.array | None:
        """Factors [B or 1, L, 1, 1] by the position, or None."""
        spec = self._spec.log_scale
        if spec is None or not spec.floor:
            return None
        first = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset
        places = (first + mx.arange(length) + 1).astype(mx.float32)
        factor = 1.0 + spec.alpha * mx.log(mx.maximum(places / spec.floor, 1.0))
        return (factor if factor.ndim == 2 else factor[None])[..., None, None]

    def _bias(self, r: mx.array, distance: mx.array) -> mx.array:
        """Biases [B, h, L, T] of relative states [B, L, h, R] by distances [L, T]; 0 past the extent."""
        extent = self._spec.extent
        profiles = (r @ find(self, "rel_logits_proj.proj").astype(r.dtype)).swapaxes(1, 2)
        index = mx.broadcast_to(mx.clip(distance, 0, extent - 1), (*profiles.shape[:2], *distance.shape))
        bias = mx.take_along_axis(profiles, index, axis=-1)
        return mx.where((distance >= 0) & (distance < extent), bias, mx.array(0.0, bias.dtype))

    def make_cache(self) -> CacheList:
        """Keys and values, and the last inputs of both convolutions."""
        window = self._spec.window
        return CacheList(RotatingKVCache(window, keep=0) if window else KVCache(), ArraysCache(size=2))


def distances(cache: Any, length: int, keys: int) -> mx.array:
    """How far each of the last ``length`` tokens stands behind each of ``keys`` that a cache gave, [L, T]."""
    if length == 1 and isinstance(cache, RotatingKVCache | BatchRotatingKVCache):
        # One token is written where the oldest stood; the youngest stands just before the cache's index.
        return ((cache._idx - 1 - mx.arange(keys)) % keys)[None]
    return (keys - length + mx.arange(length))[:, None] - mx.arange(keys)


def attend_with_sinks(
    q: mx.array, k: mx.array, v: mx.array, scale: float, bias: mx.array, sinks: mx.array
) -> mx.array:
    """Attention [B, h, L, d] with a bias [B, h, L, T] and one sink logit [B, h, L, 1] a query."""
    groups = k.shape[1]
    q, bias, sinks = (mx.unflatten(t, 1, (groups, -1)) for t in (q, bias, sinks))
    logits = (q * scale) @ k[:, :, None].swapaxes(-1, -2) + bias
    logits = mx.concatenate([logits, sinks.astype(logits.dtype)], axis=-1)
    weights = mx.softmax(logits, axis=-1, precise=True)[..., :-1]
    return (weights @ v[:, :, None]).flatten(1, 2)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `relative`."""
    return {"relative": RelativeAttention}
