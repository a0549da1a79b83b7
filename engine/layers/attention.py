"""Grouped-query attention with the switches that a family may set.

Legend: B batch, L tokens, D model width, h query heads, g key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_experts.engine.dispatch.attention_dispatch import attention
from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState, KeptAttention
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm, find, place
from mlx_experts.engine.layers.options import check_parts
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec, NormSpec, TemperatureSpec

# Queries, keys, values and a gate packed with the queries, or None.
_Project = Callable[[mx.array, ForwardState], tuple[Any, Any, Any, Any]]
# Rows [B, L, heads * d] and the position of the first to heads [B, heads, L, d].
_Heads = Callable[[mx.array, Any], mx.array]


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
        # The planner sees this too, but no attention that stands in a plugin's options.
        check_parts(self.heads, self.kv_heads, "the query heads cannot share the key heads", layer.index)
        self.head_dim = spec.head_dim or sizes.head_dim
        self.v_head_dim = spec.v_head_dim or self.head_dim
        self.scale = spec.scale if spec.scale is not None else (spec.scale_width or self.head_dim) ** -0.5
        self.window = spec.window + spec.window_extra if spec.window else None
        self.owns_kv = not spec.share_kv_every or layer.index % spec.share_kv_every == 0
        first_reusing = sizes.num_layers - spec.reuse_kv_last
        self.reuses_kv = layer.index >= first_reusing > 0
        self._layer_type = layer.type
        self._source: int | None = None
        if spec.share_kv_every and not self.owns_kv:
            self._source = layer.index - layer.index % spec.share_kv_every
        elif self.reuses_kv:
            self._source = max(i for i in range(first_reusing) if plan.layers[i].type == layer.type)
        self._gated = spec.gate is not None and spec.gate.enabled
        if self._gated and spec.gate is not None and spec.gate.path is None and spec.gate.over == "head":
            raise SpecError(
                f"the gate of layer {layer.index} is packed with the queries, with a value for each element",
                where=f"{plan.family.family}.yaml, attention.gate",
                expected="`over: element`, or the `path` of a projection",
                found="`over: head` without a path",
            )
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
            place(self, "q_proj", nn.Linear(width, q_width, bias=spec.qkv_bias))
            if self.owns_kv and not self.reuses_kv:
                place(self, "k_proj", nn.Linear(width, k_width, bias=spec.qkv_bias))
                if not spec.values_from_keys:
                    place(self, "v_proj", nn.Linear(width, v_width, bias=spec.qkv_bias))
        place(self, names.o, nn.Linear(self.heads * self.v_head_dim, width, bias=spec.out_bias))
        self._eps, qk = eps, spec.qk_norm
        self._leaves = (qk.q, qk.k) if qk is not None else ("", "")
        if qk is not None and qk.enabled:
            full = qk.over == "full"
            dims = (self.heads * self.head_dim, k_width) if full else (self.head_dim, self.head_dim)
            if qk.weight:
                kind = ZeroCentredRMSNorm if norm.offset == "run" else nn.RMSNorm
                self[qk.q] = kind(dims[0], eps=eps)
                if not self.reuses_kv:
                    self[qk.k] = kind(dims[1], eps=eps)
        if self._gated and spec.gate is not None and spec.gate.path is not None:
            per_head = self.v_head_dim if spec.gate.over == "element" else 1
            place(self, spec.gate.path, nn.Linear(width, self.heads * per_head, bias=False))
        if self._gated and spec.gate is not None and spec.gate.bias is not None:
            self[spec.gate.bias] = mx.zeros((self.heads,))
        if spec.sinks is not None and spec.sinks_enabled:
            self[spec.sinks] = mx.zeros((self.heads,))

    def __call__(
        self, x: mx.array, state: ForwardState, cache: Any = None, mask: mx.array | None = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``.

        Args:
            mask: which keys each query sees, where it is not the plain causal or windowed mask.
        """
        version, run = self._bound.held
        if version != self._version.count:
            run = self.rebind()
        return run(x, state, cache, mask)

    def bind(self) -> Callable[[mx.array, ForwardState, Any, Any], mx.array]:
        """The call as one function of ``(x, state, cache, mask)``, with the steps that the spec has."""
        spec, project, attend = self._spec, self.bind_project(), self._attend(self.bind_output())
        queries, kind = self.bind_queries(), self._layer_type

        def reuse(x: mx.array, state: ForwardState, cache: Any, mask: Any) -> mx.array:
            q, _, _, gate = project(x, state)
            kept = state.kept[kind]
            q = queries(q, kept.offset)
            return attend(q, kept.keys, kept.values, kept.cache, kept.mask, x, gate)

        if self.reuses_kv:
            return reuse
        keys, values = self.bind_keys(), self.bind_values()
        visible = ForwardState.chunked_mask if spec.chunk else ForwardState.attention_mask
        bound, keeps = spec.chunk or self.window, bool(spec.reuse_kv_last)

        def run(x: mx.array, state: ForwardState, cache: Any, mask: Any) -> mx.array:
            q, k, v, gate = project(x, state)
            # A copy, because a batch cache moves its array of offsets on in place.
            offset = 0 if cache is None else cache.offset + 0
            q, k, v = queries(q, offset), keys(k, offset), values(v)
            if mask is None:
                mask = visible(state, x, cache, bound)  # type: ignore[arg-type]
            if cache is not None:
                k, v = cache.update_and_fetch(k, v)
            if keeps:
                state.kept[kind] = KeptAttention(k, v, cache, mask, offset)
            return attend(q, k, v, cache, mask, x, gate)

        return run

    def bind_queries(self) -> _Heads:
        """Queries, times a factor that grows with the position where the family has one."""
        queries, spec = self.bind_heads(self.heads, self._leaves[0]), self._spec.temperature
        if spec is None or not spec.enabled:
            return queries

        def tempered(t: mx.array, offset: Any) -> mx.array:
            q = queries(t, offset)
            return q * query_temperature(spec, offset, q.shape[2], q.dtype)

        return tempered

    def bind_keys(self) -> _Heads:
        """Keys, normalised and rotated."""
        return self.bind_heads(self.kv_heads, self._leaves[1])

    def bind_project(self) -> _Project:
        """Queries, keys, values and a gate packed with the queries, or None; heads not yet split."""
        spec, names = self._spec, self._spec.names
        if names.qkv is not None:
            qkv, q_width = find(self, names.qkv), self.heads * self.head_dim
            cuts = [q_width, q_width + self.kv_heads * self.head_dim]

            def project(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
                return *mx.split(qkv(x), cuts, axis=-1), None  # type: ignore[return-value]

        elif self.owns_kv and not self.reuses_kv and not spec.values_from_keys:
            q_proj, k_proj, v_proj = self["q_proj"], self["k_proj"], self["v_proj"]

            def project(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
                return q_proj(x), k_proj(x), v_proj(x), None

        elif self.owns_kv and not self.reuses_kv:
            q_proj, k_proj = self["q_proj"], self["k_proj"]

            def project(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
                k = k_proj(x)
                return q_proj(x), k, k, None

        else:
            q_proj = self["q_proj"]

            def project(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
                return q_proj(x), *(state.projected_kv or (None, None)), None

        return self._packed_gate(project if not spec.share_kv_every else _sharing(project))

    def _packed_gate(self, project: _Project) -> _Project:
        gate = self._spec.gate
        if not self._gated or gate is None or gate.path is not None:
            return project
        parts = (self.heads, 2, self.head_dim)

        def parted(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
            q, k, v, _ = project(x, state)
            # Packed per head as [q, gate], not as two halves of the matrix.
            pairs = mx.unflatten(q, -1, parts)
            return pairs[..., 0, :].flatten(-2), k, v, pairs[..., 1, :].flatten(-2)

        return parted

    def bind_heads(self, heads: int, leaf: str) -> _Heads:
        """Queries or keys [B, L, heads * d] to heads [B, heads, L, d], normalised and rotated."""
        spec, head_dim = self._spec, self.head_dim
        qk = spec.qk_norm if spec.qk_norm is not None and spec.qk_norm.enabled else None
        norm = self._normalise(leaf) if qk is not None else None
        rope = self._rope.bound() if self._rope is not None else None
        before = _chain(norm if qk is not None and qk.over == "full" else None, _clip(spec.clip))
        split = norm if qk is not None and qk.over == "head" and not qk.after_rope else None
        after = norm if qk is not None and qk.over == "head" and qk.after_rope else None
        if before is None and split is not None and rope is not None:

            def usual(t: mx.array, offset: Any) -> mx.array:
                B, L, _ = t.shape
                return rope(split(t.reshape(B, L, heads, head_dim)).swapaxes(1, 2), offset=offset)

            return usual

        def turn(t: mx.array, offset: Any) -> mx.array:
            B, L, _ = t.shape
            t = (t if before is None else before(t)).reshape(B, L, heads, head_dim)
            t = (t if split is None else split(t)).swapaxes(1, 2)
            t = t if rope is None else rope(t, offset=offset)
            return t if after is None else after(t)

        return turn

    def _normalise(self, leaf: str) -> Callable[[mx.array], mx.array]:
        assert self._spec.qk_norm is not None
        if self._spec.qk_norm.weight:
            norm: Callable[[mx.array], mx.array] = self[leaf]
            return norm
        return partial(mx.fast.rms_norm, weight=None, eps=self._eps)

    def bind_values(self) -> Callable[[mx.array], mx.array]:
        """Values [B, L, g * d] to heads [B, g, L, d]."""
        spec, heads, width, eps = self._spec, self.kv_heads, self.v_head_dim, self._eps
        clip, normed, scale = _clip(spec.clip), spec.value_norm, spec.value_scale

        def plain(v: mx.array) -> mx.array:
            B, L, _ = v.shape
            return v.reshape(B, L, heads, width).swapaxes(1, 2)

        def values(v: mx.array) -> mx.array:
            v = plain(v if clip is None else clip(v))
            v = mx.fast.rms_norm(v, None, eps) if normed else v
            return v if scale == 1.0 else v * scale

        return plain if clip is None and not normed and scale == 1.0 else values

    def _attend(self, output: Any) -> Callable[..., mx.array]:
        """Heads [B, h, L, d] of queries, keys and values, the layer's input and a gate to [B, L, D]."""
        spec, scale, width = self._spec, self.scale, self.heads * self.v_head_dim
        sinks = self[spec.sinks] if spec.sinks is not None and spec.sinks_enabled else None
        gated, product = not isinstance(output, nn.Module), attention(self.fused)

        def plain(q: mx.array, k: Any, v: Any, cache: Any, mask: Any, x: mx.array, gate: Any) -> mx.array:
            B, _, L, _ = q.shape
            out = product(q, k, v, cache=cache, scale=scale, mask=mask)
            out = out.swapaxes(1, 2).reshape(B, L, width)
            return output(out, x, gate) if gated else output(out)

        def attend(q: mx.array, k: Any, v: Any, cache: Any, mask: Any, x: mx.array, gate: Any) -> mx.array:
            (B, _, L, _), dtype = q.shape, q.dtype
            if spec.float32:
                q = q.astype(mx.float32)
            weight = None if sinks is None else sinks.astype(q.dtype)
            out = product(q, k, v, cache=cache, scale=scale, mask=mask, sinks=weight)
            out = out.astype(dtype).swapaxes(1, 2).reshape(B, L, width)
            return output(out, x, gate) if gated else output(out)

        return attend if sinks is not None or spec.float32 else plain

    def bind_output(self, logits_given: bool = False) -> Any:
        """The output projection; behind a gate a function of its input, the layer's and a packed gate.

        Args:
            logits_given: the gate's logits come in the packed gate's place, also where it has a projection.
        """
        gate, out_proj = self._spec.gate, find(self, self._spec.names.o)
        if not self._gated or gate is None:
            return out_proj
        logits = find(self, gate.path) if gate.path is not None and not logits_given else None
        factor: Callable[[mx.array], mx.array] = _softplus if gate.function == "softplus" else mx.sigmoid
        parts = None if gate.over == "element" else (self.heads, self.v_head_dim)
        if gate.bias is not None and logits is not None:
            logits = self._biased(logits, gate.bias, 1 if parts is not None else self.v_head_dim)

        def output(out: mx.array, x: mx.array, packed: Any) -> mx.array:
            share = factor(packed if logits is None else logits(x)).astype(out.dtype)
            if parts is None:
                return out_proj(out * share)
            return out_proj((mx.unflatten(out, -1, parts) * share[..., None]).flatten(-2))

        return output

    def _biased(self, logits: Any, leaf: str, per_head: int) -> Callable[[mx.array], mx.array]:
        """A gate's projection with a bias for each head."""
        return lambda x: logits(x) + mx.repeat(self[leaf], per_head).astype(x.dtype)

    def cuts(self) -> Cuts:
        """Each rank keeps some of the heads, and what belongs to each of them."""
        spec, names = self._spec, self._spec.names
        rows: dict[str, list[int] | int] = {
            path: 1 for path in ("q_proj", "k_proj", "v_proj") if path in self
        }
        if names.qkv is not None:
            q_width, k_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
            rows[names.qkv] = [q_width, q_width + k_width]
        if self._gated and spec.gate is not None and spec.gate.path is not None:
            rows[spec.gate.path] = 1
        gate_bias = spec.gate.bias if self._gated and spec.gate is not None else None
        sinks = spec.sinks if spec.sinks_enabled else None
        full = spec.qk_norm is not None and spec.qk_norm.over == "full"
        return Cuts(
            counts={"heads": "query heads", "kv_heads": "key-value heads"},
            rows=rows,
            columns=(names.o,),
            heads=tuple(leaf for leaf in (sinks, gate_bias) if leaf is not None),
            norms=tuple(leaf for leaf in self._leaves if leaf in self and full),
        )

    @property
    def source(self) -> int | None:
        """The earlier layer whose keys and values it uses."""
        return self._source

    @property
    def may_forget(self) -> bool:
        """Chunks are counted from the first token, so a layer that has them needs every key's place."""
        return not self._spec.chunk

    def make_cache(self) -> Any:
        """Keys and values, within the window where there is one; None where the layer reads another's."""
        if self.reuses_kv:
            return None
        if self.window is not None:
            return RotatingKVCache(max_size=self.window, keep=0)
        return KVCache()


def _sharing(project: _Project) -> _Project:
    """As ``project``, leaving keys and values for the next layers."""

    def shared(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
        q, k, v, gate = project(x, state)
        # Projections are shared, not what norms, rotation and cache make of them.
        state.projected_kv = (k, v)
        return q, k, v, gate

    return shared


def _clip(bound: float | None) -> Callable[[mx.array], mx.array] | None:
    return None if bound is None else lambda t: mx.clip(t, -bound, bound)


def _chain(
    first: Callable[[mx.array], mx.array] | None, second: Callable[[mx.array], mx.array] | None
) -> Callable[[mx.array], mx.array] | None:
    """Both functions in a row, the one that there is, or None."""
    if first is None or second is None:
        return first or second
    return lambda t: second(first(t))


def _softplus(logits: mx.array) -> mx.array:
    return nn.softplus(logits.astype(mx.float32))


def query_temperature(spec: TemperatureSpec, offset: Any, length: int, dtype: mx.Dtype) -> mx.array:
    """Factors ``[L, 1]`` (or ``[B, 1, L, 1]`` in a padded batch) on queries by their position."""
    if spec.floor <= 0:
        raise ConfigError("the query scale needs a positive number of positions", found=str(spec.floor))
    steps = mx.arange(length)
    positions = offset[:, None] + steps if isinstance(offset, mx.array) and offset.ndim else offset + steps
    shares = (positions.astype(mx.float32) + spec.shift) / spec.floor
    if spec.form == "power":
        factors = mx.exp(spec.scale * mx.log1p(shares)).astype(dtype)[..., None]
    else:
        factors = (1.0 + spec.scale * mx.log1p(mx.floor(shares))).astype(dtype)[..., None]
    return factors[:, None] if factors.ndim == 3 else factors
