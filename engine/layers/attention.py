"""Grouped-query attention with the switches that a family may set.

Legend: B batch, L tokens, D model width, h query heads, g key-value heads, d head width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm, place
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.layers.tensor_parallel import (
    Group,
    ShardedRMSNorm,
    share_of,
    spread_columns,
    spread_rows,
)
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec, NormSpec, TemperatureSpec


class Attention(Mixer):
    """Grouped-query attention (Ainslie et al. 2023).

    Args:
        layer: the layer's plan; its mixer is a resolved ``GqaSpec``.
        plan: the model's plan; the query and key norms share its norm's offset.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        spec, sizes = layer.mixer, layer.sizes
        assert isinstance(spec, GqaSpec)
        self._spec, self._layer = spec, layer.index
        self.heads = spec.heads or sizes.num_heads
        self.kv_heads = spec.kv_heads or sizes.num_kv_heads
        self.head_dim = spec.head_dim or sizes.head_dim
        self.v_head_dim = spec.v_head_dim or self.head_dim
        self.scale = spec.scale if spec.scale is not None else (spec.scale_width or self.head_dim) ** -0.5
        self.window = spec.window + spec.window_extra if spec.window else None
        self.owns_kv = not spec.share_kv_every or layer.index % spec.share_kv_every == 0
        first_reusing = sizes.num_layers - spec.reuse_kv_last
        self.reuses_kv = layer.index >= first_reusing > 0
        self._kept = ("kept", layer.type)
        self._gated = spec.gate is not None and spec.gate.enabled
        self._build(spec, sizes.hidden_size, plan.norm, sizes.norm_eps)
        if layer.rope is not None:
            self._rope: Rope | None = Rope(layer.rope, layer.rope.width(self.head_dim), self.head_dim)
        else:
            self._rope = None

    def _build(self, spec: GqaSpec, width: int, norm: NormSpec, eps: float) -> None:
        names = spec.names
        packed = spec.gate is not None and spec.gate.path is None and self._gated
        q_width = self.heads * self.head_dim * (2 if packed else 1)
        k_width, v_width = self.kv_heads * self.head_dim, self.kv_heads * self.v_head_dim
        if names.qkv is not None:
            place(self, names.qkv, nn.Linear(width, q_width + k_width + v_width, bias=spec.qkv_bias))
        else:
            place(self, names.q, nn.Linear(width, q_width, bias=spec.qkv_bias))
            if self.owns_kv and not self.reuses_kv:
                place(self, names.k, nn.Linear(width, k_width, bias=spec.qkv_bias))
                if not spec.values_from_keys:
                    place(self, names.v, nn.Linear(width, v_width, bias=spec.qkv_bias))
        place(self, names.o, nn.Linear(self.heads * self.v_head_dim, width, bias=spec.out_bias))
        self._eps, qk = eps, spec.qk_norm
        self._leaves = (qk.q, qk.k) if qk is not None else ("", "")
        if qk is not None and qk.enabled:
            qk_eps = qk.eps if qk.eps is not None else eps
            full = qk.over == "full"
            dims = (self.heads * self.head_dim, k_width) if full else (self.head_dim, self.head_dim)
            if qk.weight:
                kind = ZeroCentredRMSNorm if norm.offset == "run" else nn.RMSNorm
                self[qk.q] = kind(dims[0], eps=qk_eps)
                if not self.reuses_kv:
                    self[qk.k] = kind(dims[1], eps=qk_eps)
            self._qk_eps = qk_eps
        if self._gated and spec.gate is not None and spec.gate.path is not None:
            per_head = self.v_head_dim if spec.gate.over == "element" else 1
            place(self, spec.gate.path, nn.Linear(width, self.heads * per_head, bias=False))
        if spec.sinks is not None and spec.sinks_enabled:
            self[spec.sinks] = mx.zeros((self.heads,))

    def _project(self, x: mx.array, state: ForwardState) -> tuple[mx.array, Any, Any, mx.array | None]:
        """Queries, keys, values and a gate packed with the queries, or None; heads not yet split."""
        names, gate = self._spec.names, None
        k = v = None
        if names.qkv is not None:
            q_width, k_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
            q, k, v = mx.split(self[names.qkv](x), [q_width, q_width + k_width], axis=-1)
        else:
            q = self[names.q](x)
            if not self.owns_kv:
                k, v = state.shared["kv"]
            elif not self.reuses_kv:
                k = self[names.k](x)
                v = k if self._spec.values_from_keys else self[names.v](x)
            if self._spec.share_kv_every:
                # Projections are shared, not what norms, rotation and cache make of them.
                state.shared["kv"] = (k, v)
        if self._gated and self._spec.gate is not None and self._spec.gate.path is None:
            # Packed per head as [q, gate], not as two halves of the matrix.
            pairs = q.reshape(*q.shape[:-1], self.heads, 2, self.head_dim)
            q, gate = (pairs[..., i, :].flatten(-2) for i in (0, 1))
        return q, k, v, gate

    def _turned(self, t: mx.array, heads: int, leaf: str, offset: Any) -> mx.array:
        """Queries or keys [B, L, heads * d] as heads [B, heads, L, d], normalised and rotated."""
        spec, (B, L, _) = self._spec, t.shape
        qk = spec.qk_norm if spec.qk_norm is not None and spec.qk_norm.enabled else None
        if qk is not None and qk.over == "full":
            t = self._normalise(t, leaf)
        t = self._clipped(t).reshape(B, L, heads, self.head_dim)
        if qk is not None and qk.over == "head" and not qk.after_rope:
            t = self._normalise(t, leaf)
        t = t.swapaxes(1, 2)
        if self._rope is not None:
            t = self._rope(t, offset)
        if qk is not None and qk.over == "head" and qk.after_rope:
            t = self._normalise(t, leaf)
        return t

    def _normalise(self, t: mx.array, leaf: str) -> mx.array:
        assert self._spec.qk_norm is not None
        return self[leaf](t) if self._spec.qk_norm.weight else mx.fast.rms_norm(t, None, self._qk_eps)

    def _clipped(self, t: mx.array) -> mx.array:
        bound = self._spec.clip
        return t if bound is None else mx.clip(t, -bound, bound)

    def _values(self, v: mx.array) -> mx.array:
        """Values [B, L, g * d] as heads [B, g, L, d]."""
        spec, (B, L, _) = self._spec, v.shape
        v = self._clipped(v).reshape(B, L, self.kv_heads, self.v_head_dim).swapaxes(1, 2)
        if spec.value_norm:
            v = mx.fast.rms_norm(v, None, self._eps)
        return v if spec.value_scale == 1.0 else v * spec.value_scale

    def __call__(
        self, x: mx.array, state: ForwardState, cache: Any = None, mask: mx.array | None = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``.

        Args:
            mask: which keys each query sees, where it is not the plain causal or windowed mask.
        """
        spec, (B, L, _) = self._spec, x.shape
        q, k, v, gate = self._project(x, state)
        if self.reuses_kv:
            k, v, cache, mask, offset = state.shared[self._kept]
        else:
            # A copy, because a batch cache moves its array of offsets on in place.
            offset = 0 if cache is None else cache.offset + 0
        q = self._turned(q, self.heads, self._leaves[0], offset)
        if spec.temperature is not None and spec.temperature.enabled:
            q = q * query_temperature(spec.temperature, offset, L, q.dtype)
        if not self.reuses_kv:
            k, v = self._turned(k, self.kv_heads, self._leaves[1], offset), self._values(v)
            if mask is None:
                mask = self._visible(x, state, cache)
            if cache is not None:
                k, v = cache.update_and_fetch(k, v)
            if spec.reuse_kv_last:
                state.shared[self._kept] = (k, v, cache, mask, offset)
        dtype = q.dtype
        if spec.float32:
            q = q.astype(mx.float32)
        out = scaled_dot_product_attention(
            q, k, v, cache=cache, scale=self.scale, mask=mask, sinks=self._sinks(q.dtype)
        ).astype(dtype)
        out = out.swapaxes(1, 2).reshape(B, L, self.heads * self.v_head_dim)
        return self[spec.names.o](self._gate(out, x, gate))

    def _visible(self, x: mx.array, state: ForwardState, cache: Any) -> Any:
        """The causal mask, inside a window or a chunk where there is one."""
        if self._spec.chunk:
            return state.chunked_mask(x, cache, self._spec.chunk)
        return state.attention_mask(x, cache, self.window)

    def _sinks(self, dtype: mx.Dtype) -> mx.array | None:
        leaf = self._spec.sinks
        return self[leaf].astype(dtype) if leaf is not None and self._spec.sinks_enabled else None

    def _gate(self, out: mx.array, x: mx.array, packed: mx.array | None) -> mx.array:
        gate = self._spec.gate
        if gate is None or not gate.enabled:
            return out
        logits = packed if packed is not None else self[gate.path](x)
        if gate.function == "softplus":
            factor = nn.softplus(logits.astype(mx.float32)).astype(out.dtype)
        else:
            factor = mx.sigmoid(logits)
        if gate.over == "element":
            return out * factor
        heads = out.reshape(*out.shape[:-1], self.heads, self.v_head_dim)
        return (heads * factor[..., None]).flatten(-2)

    def shard(self, group: Group) -> None:
        """Keep this rank's heads, and what belongs to each of them."""
        spec, names = self._spec, self._spec.names
        heads = share_of(self.heads, group, "query heads")
        kv_heads = share_of(self.kv_heads, group, "key-value heads")
        if names.qkv is not None:
            q_width, k_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
            spread_rows(self, names.qkv, group, segments=[q_width, q_width + k_width])
        for path in (names.q, names.k, names.v):
            if path in self:
                spread_rows(self, path, group)
        if self._gated and spec.gate is not None and spec.gate.path is not None:
            spread_rows(self, spec.gate.path, group)
        spread_columns(self, names.o, group)
        for leaf in self._leaves:
            if leaf in self and spec.qk_norm is not None and spec.qk_norm.over == "full":
                self[leaf] = ShardedRMSNorm(self[leaf], group)
        if spec.sinks is not None and spec.sinks_enabled:
            self[spec.sinks] = self[spec.sinks][group.rank() * heads : (group.rank() + 1) * heads]
        self.heads, self.kv_heads = heads, kv_heads

    def make_cache(self) -> Any:
        """A cache for this layer, or None where it reads another's."""
        if self.reuses_kv:
            return None
        if self.window is not None:
            return RotatingKVCache(max_size=self.window, keep=0)
        return KVCache()


def query_temperature(spec: TemperatureSpec, offset: Any, length: int, dtype: mx.Dtype) -> mx.array:
    """Factors ``[L, 1]`` (or ``[B, 1, L, 1]`` in a padded batch) on queries by their position."""
    if spec.floor <= 0:
        raise ConfigError("the query scale needs a positive number of positions", found=str(spec.floor))
    steps = mx.arange(length)
    positions = offset[:, None] + steps if isinstance(offset, mx.array) and offset.ndim else offset + steps
    growth = mx.log1p(mx.floor((positions.astype(mx.float32) + spec.shift) / spec.floor))
    factors = (1.0 + spec.scale * growth).astype(dtype)[..., None]
    return factors[:, None] if factors.ndim == 3 else factors
