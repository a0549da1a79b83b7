"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1), caching latents or full heads.

Legend: B batch, L tokens, T cached tokens, D model width, h heads, n / r / v widths of a head without
position, with position and of values, c latent width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.mla import MultiLinear
from pydantic import Field

from mlx_experts.engine.layers.attention import query_temperature
from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.rope import Rope, yarn_mscale
from mlx_experts.engine.layers.rope_turns import turn
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import OutputGateSpec, PluginMixerSpec, TemperatureSpec
from mlx_experts.registry.spec.rope_plan import RopePlan
from mlx_experts.registry.spec.values import Bool, Count, Leaf, ModulePath, Positive, Spec, Width


class MlaOptions(Spec):
    """Options of latent attention."""

    q_rank: Count | None = Field(description="Latent width of queries; null or 0 for one full projection.")
    kv_rank: Width = Field(description="Latent width of keys and values.")
    nope_dim: Width = Field(description="Width of a query and key head that is not rotated.")
    rope_dim: Count = Field(description="Width of a query and key head that is rotated; 0 for none.")
    v_dim: Width = Field(description="Width of a value head.")
    bias: Bool = Field(False, description="Biases on the projections into latents and on the output.")
    eps: Positive = Field(1e-6, description="Epsilon of the norms on latents.")
    heads: Count | None = Field(None, description="Heads; the size `num_heads` when absent.")
    window: Count | None = Field(None, description="Visible tokens, the token itself counted; null for all.")
    turned: Bool = Field(True, description="Without, the rotated width is one more part without position.")
    still_every: Count = Field(0, description="Every n-th layer turns nothing; 0 for none.")
    scale_q: Bool = Field(False, description="Query latents are multiplied by sqrt(model width / q_rank).")
    scale_kv: Bool = Field(False, description="Latents are multiplied by sqrt(model width / kv_rank).")
    expanded: bool = Field(False, description="Full keys and values are cached, and kv_b_proj is kept whole.")
    out: ModulePath = Field("o_proj", description="Leaf of the output projection.")
    gate: OutputGateSpec | None = Field(
        None, description="Gate on the output; without a path it is packed in q, per head [q, gate]."
    )
    temperature: TemperatureSpec | None = Field(None, description="Query scale by position.")
    position_scale: ModulePath | None = Field(
        None, description="Module of a learned query scale for each head, `scale * log(position + 1) + bias`."
    )
    rope_key_norm: ModulePath | None = Field(None, description="Leaf of a norm on the key that is rotated.")
    raw_latent: bool = Field(False, description="Queries are made of [normed latent, latent].")
    sinks: Leaf | None = Field(None, description="Leaf with one learned sink logit for each head.")
    learned_frequencies: bool = Field(False, description="The decoder's learned factors scale frequencies.")
    sources: list[Count] | None = Field(
        None, description="For each layer the one whose latents it attends to; itself where it has its own."
    )


class LatentAttention(Mixer):
    """Latent attention after transformers' ``models/deepseek_v3/modeling_deepseek_v3.py``.

    The cache holds the normed latent and the one rotated key that all heads share. One token attends to
    latents, with the key's up-projection moved to the query (``embed_q``) and the value's to the output
    (``unembed_out``); more tokens expand the latents first, which takes fewer operations.

    Args:
        layer: the layer's plan; the mixer's options are :class:`MlaOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: what the decoder learned of frequencies is of another width than the part that turns.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(self.options_kind(), layer, "latent attention")
        self.heads, self.width = spec.heads or layer.sizes.num_heads, layer.sizes.hidden_size
        self.scale = softmax_scale(spec.nope_dim + spec.rope_dim, layer.rope)
        turned = spec.turned and not (spec.still_every and (layer.index + 1) % spec.still_every == 0)
        self.nope_dim = spec.nope_dim if turned else spec.nope_dim + spec.rope_dim
        self.rope_dim = spec.rope_dim if turned else 0
        rotates = layer.rope is not None and self.rope_dim > 0
        self._rope = Rope(layer.rope, self.rope_dim) if layer.rope is not None and rotates else None
        if spec.learned_frequencies and layer.rope is not None:
            learned = layer.rope.width(layer.sizes.head_dim)
            if learned != spec.rope_dim:
                raise ConfigError(
                    "the decoder's learned frequencies do not fit the part of a head that turns",
                    where=f"{plan.family.family}.yaml, layer {layer.index}",
                    expected=f"config.head_dim, or rope.dims, of rope_dim, {spec.rope_dim}",
                    found=str(learned),
                )
        self._packed = spec.gate is not None and spec.gate.enabled and spec.gate.path is None
        self._borrows, self._lends = borrowing(spec, layer.index)
        self._lender = spec.sources[layer.index] if spec.sources is not None and self._borrows else None
        self._build(spec)

    @classmethod
    def options_kind(cls) -> type[MlaOptions]:
        """The model that the mixer's options are read into."""
        return MlaOptions

    def _build(self, spec: MlaOptions) -> None:
        width, q_width = self.width, self.heads * (spec.nope_dim + spec.rope_dim)
        q_width += self.heads * spec.v_dim if self._packed else 0
        if not spec.q_rank:
            self.q_proj = nn.Linear(width, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, spec.q_rank, bias=spec.bias)
            self.q_a_layernorm = nn.RMSNorm(spec.q_rank, eps=spec.eps)
            self.q_b_proj = nn.Linear(spec.q_rank * (2 if spec.raw_latent else 1), q_width, bias=False)
        if not self._borrows:
            self.kv_a_proj_with_mqa = nn.Linear(width, spec.kv_rank + self.rope_dim, bias=spec.bias)
            self.kv_a_layernorm = nn.RMSNorm(spec.kv_rank, eps=spec.eps)
        if spec.rope_key_norm is not None:
            place(self, spec.rope_key_norm, nn.RMSNorm(self.rope_dim, eps=spec.eps))
        self._build_up_projections(spec)
        place(self, spec.out, nn.Linear(self.heads * spec.v_dim, width, bias=spec.bias))
        if spec.gate is not None and spec.gate.enabled and spec.gate.path is not None:
            per_head = spec.v_dim if spec.gate.over == "element" else 1
            place(self, spec.gate.path, nn.Linear(width, self.heads * per_head, bias=False))
        if spec.position_scale is not None:
            place(self, spec.position_scale, PositionScale(self.heads))
        if spec.sinks is not None:
            self[spec.sinks] = mx.zeros((self.heads,))

    def _build_up_projections(self, spec: MlaOptions) -> None:
        self.embed_q = MultiLinear(self.nope_dim, spec.kv_rank, self.heads)
        self.unembed_out = MultiLinear(spec.kv_rank, spec.v_dim, self.heads)

    def query_latent(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The normed latent [B, L, q_rank] of queries, and what they are made of; without one, ``x``."""
        spec = self._spec
        if not spec.q_rank:
            return x, x
        return self.query_latent_of(self.q_a_proj(x))

    def query_latent_of(self, raw: mx.array) -> tuple[mx.array, mx.array]:
        """As :meth:`query_latent`, of what ``q_a_proj`` gives."""
        spec, latent = self._spec, self.q_a_layernorm(raw)
        if spec.scale_q:
            latent = latent * (self.width / latent.shape[-1]) ** 0.5
        return latent, mx.concatenate([latent, raw], axis=-1) if spec.raw_latent else latent

    def queries(
        self, source: mx.array, state: ForwardState, offset: Any
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Queries without and with position, [B, h, L, n] and [B, h, L, r], the latter rotated, and a gate.

        Args:
            source: what :meth:`query_latent` gives for it.
            offset: position of the first query.
        """
        q = self.q_b_proj(source) if self._spec.q_rank else self.q_proj(source)
        return self.queries_of(q, state, offset)

    def queries_of(
        self, q: mx.array, state: ForwardState | None, offset: Any
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """As :meth:`queries`, of what the last projection of queries gives.

        Args:
            state: read where frequencies are learned.
        """
        spec, (B, L, _) = self._spec, q.shape
        q, gate = q.reshape(B, L, self.heads, -1).swapaxes(1, 2), None
        if self._packed:
            q, gate = mx.split(q, [spec.nope_dim + spec.rope_dim], axis=-1)
        if spec.temperature is not None and spec.temperature.enabled:
            q = q * query_temperature(spec.temperature, offset, L, q.dtype)
        if spec.position_scale is not None:
            q = find(self, spec.position_scale)(q, offset)
        nope, rope = mx.split(q, [self.nope_dim], axis=-1)
        return nope, self._turned(rope, state, offset), gate

    def _turned(self, t: mx.array, state: ForwardState | None, offset: Any) -> mx.array:
        if self._rope is None:
            return t
        if self._spec.learned_frequencies:
            assert state is not None
            return turn(self._rope, t, offset, log_scale=state.log_frequencies)
        return self._rope(t, offset)

    def latents(self, x: mx.array, state: ForwardState, offset: Any) -> tuple[mx.array, mx.array]:
        """The latent [B, 1, L, c] of keys and values, and the shared rotated key [B, 1, L, r]."""
        return self.latents_of(self.kv_a_proj_with_mqa(x), state, offset)

    def latents_of(self, row: mx.array, state: ForwardState | None, offset: Any) -> tuple[mx.array, mx.array]:
        """As :meth:`latents`, of what ``kv_a_proj_with_mqa`` gives."""
        spec = self._spec
        latent, rope = mx.split(row, [spec.kv_rank], axis=-1)
        latent, rope = self.kv_a_layernorm(latent)[:, None], rope[:, None]
        if spec.scale_kv:
            latent = latent * (self.width / spec.kv_rank) ** 0.5
        if spec.rope_key_norm is not None:
            rope = find(self, spec.rope_key_norm)(rope)
        return latent, self._turned(rope, state, offset)

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        offset = cache.offset if cache is not None else 0
        mask = state.attention_mask(x, cache, self._spec.window or None)
        q_nope, q_rope, gate = self.queries(self.query_latent(x)[1], state, offset)
        out = self.attend(q_nope, q_rope, *self.latents(x, state, offset), mask, cache)
        return self.output(out, x, gate)

    def attend(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        """Attention output [B, h, L, v]; extends ``cache`` with the latents."""
        if cache is not None:
            latent, k_rope = remember(cache, latent, k_rope)
        return self.attend_to_latents(q_nope, q_rope, latent, k_rope, mask)

    def attend_to_latents(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: Any
    ) -> mx.array:
        """Attention output [B, h, L, v] over latents [B, 1, T, c] and keys [B, 1, T, r]."""
        if q_nope.shape[2] == 1:
            out = self.attend_embedded(self.embed_q(q_nope), q_rope * self.scale, latent, k_rope, mask)
            return self.unembed_out(out)
        sinks = self._sinks(q_nope.dtype)
        k_nope, values = self.embed_q(latent, transpose=False), self.unembed_out(latent)
        q = mx.concatenate([q_nope, q_rope], axis=-1) if self.rope_dim else q_nope
        k = joined(k_nope, k_rope) if self.rope_dim else k_nope
        return mx.fast.scaled_dot_product_attention(q, k, values, scale=self.scale, mask=mask, sinks=sinks)

    def _sinks(self, dtype: mx.Dtype) -> mx.array | None:
        return self[self._spec.sinks].astype(dtype) if self._spec.sinks is not None else None

    def attend_embedded(
        self, q: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: Any
    ) -> mx.array:
        """One token's attention output [B, h, 1, c] as a latent.

        Args:
            q: queries [B, h, 1, c] as ``embed_q`` leaves them.
            q_rope: their rotated part [B, h, 1, r], times the scale.
        """
        if self.rope_dim:
            scores = q_rope @ k_rope.swapaxes(-1, -2)
            if mask is not None:
                scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
            mask = scores
        return mx.fast.scaled_dot_product_attention(
            q, latent, latent, scale=self.scale, mask=mask, sinks=self._sinks(q.dtype)
        )

    def output(self, out: mx.array, x: mx.array, packed: mx.array | None = None) -> mx.array:
        """Gate and project the attention output [B, h, L, v] to [B, L, D].

        Args:
            packed: a gate [B, h, L, v] that came with the queries.
        """
        gate, logits = self._spec.gate, None
        if gate is not None and gate.enabled:
            logits = packed.swapaxes(1, 2) if packed is not None else find(self, gate.path or "")(x)
        return self.output_of(out, logits)

    def output_of(self, out: mx.array, logits: mx.array | None) -> mx.array:
        """As :meth:`output`, with the gate's logits [B, L, ...] or None."""
        gate, out = self._spec.gate, out.swapaxes(1, 2)
        if gate is not None and logits is not None:
            logits = logits.astype(mx.float32)
            factor = mx.sigmoid(logits) if gate.function == "sigmoid" else nn.softplus(logits)
            out = out * factor.reshape(*out.shape[:-1], -1).astype(out.dtype)
        return find(self, self._spec.out)(out.flatten(-2))

    def cuts(self) -> Cuts:
        """Each rank keeps some of the heads; latents, and what makes them, stay whole."""
        spec = self._spec
        rows: dict[str, list[int] | int] = {"q_b_proj" if spec.q_rank else "q_proj": 1}
        if spec.gate is not None and spec.gate.enabled and spec.gate.path is not None:
            rows[spec.gate.path] = 1
        more, heads = self._up_projections()
        heads = (*heads, spec.sinks) if spec.sinks is not None else heads
        if spec.position_scale is not None:
            heads = (*heads, f"{spec.position_scale}.scale", f"{spec.position_scale}.bias")
        return Cuts({"heads": "heads of latent attention"}, {**rows, **more}, (spec.out,), heads)

    def _up_projections(self) -> tuple[dict[str, list[int] | int], tuple[str, ...]]:
        """Linear layers with rows, and stacks with an axis, of heads."""
        return {}, ("embed_q", "unembed_out")

    @property
    def source(self) -> int | None:
        """The earlier layer whose latents it attends to."""
        return self._lender

    def make_cache(self) -> Any:
        """A cache of latents and rotated keys."""
        window = self._spec.window
        return RotatingKVCache(max_size=window, keep=0) if window else KVCache()


class ExpandedAttention(LatentAttention):
    """Latent attention that keeps ``kv_b_proj`` and caches every head's keys and values."""

    def _build_up_projections(self, spec: MlaOptions) -> None:
        self.kv_b_proj = nn.Linear(spec.kv_rank, self.heads * (spec.nope_dim + spec.v_dim), bias=False)

    def _up_projections(self) -> tuple[dict[str, list[int] | int], tuple[str, ...]]:
        """Linear layers with rows, and stacks with an axis, of heads."""
        return {"kv_b_proj": 1}, ()

    def attend(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        """Attention output [B, h, L, v]; extends ``cache`` with keys and values."""
        B, _, L, _ = latent.shape
        pairs = self.kv_b_proj(latent[:, 0]).reshape(B, L, self.heads, -1).swapaxes(1, 2)
        k_nope, v = mx.split(pairs, [self._spec.nope_dim], axis=-1)
        k = joined(k_nope, k_rope)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        q = mx.concatenate([q_nope, q_rope], axis=-1)
        return scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)


class PositionScale(nn.Module):
    """A learned scale of each query head that grows with the logarithm of the position.

    The source is transformers' ``models/mistral_large4/modeling_mistral_large4.py`` (SoftmaxScaling).
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale, self.bias = mx.zeros((heads,)), mx.ones((heads,))

    def __call__(self, q: mx.array, offset: Any) -> mx.array:
        """Queries [B, h, L, d] times ``scale * log(position + 1) + bias``."""
        steps = mx.arange(q.shape[2])
        first = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset
        # A padded position has no logarithm, and nothing reads it.
        logs = mx.log(mx.maximum(first + steps + 1, 1).astype(mx.float32)).astype(q.dtype)
        logs = logs[:, None] if logs.ndim == 2 else logs
        factor = self.scale[:, None].astype(q.dtype) * logs + self.bias[:, None].astype(q.dtype)
        return q * factor[..., None]


def borrowing(spec: MlaOptions, layer: int) -> tuple[bool, bool]:
    """Whether a layer attends to another's latents, and whether a later layer attends to its own.

    Raises:
        ConfigError: the sources are too few, or name a later layer.
    """
    if spec.sources is None:
        return False, False
    if layer >= len(spec.sources) or spec.sources[layer] > layer:
        raise ConfigError(
            "config.json does not say whose latents each layer attends to",
            where="config.json or the family file",
            expected=f"for layer {layer} itself or an earlier one",
            found=repr(spec.sources)[:80],
        )
    return spec.sources[layer] != layer, layer in spec.sources[layer + 1 :]


def softmax_scale(head_dim: int, rope: RopePlan | None) -> float:
    """``head_dim ** -0.5``, times YaRN's squared magnitude where rope parameters state `mscale_all_dim`."""
    scale: float = head_dim**-0.5
    all_dim = rope.number("mscale_all_dim", 0.0) if rope is not None and rope.type != "default" else 0.0
    if rope is None or not all_dim:
        return scale
    return scale * yarn_mscale(rope.number("factor"), all_dim) ** 2


def joined(nope: mx.array, rope: mx.array) -> mx.array:
    """Keys [B, h, T, n + r] of heads without position and the one rotated key that they share."""
    shared = mx.broadcast_to(rope, (*nope.shape[:-1], rope.shape[-1]))
    return mx.concatenate([nope, shared], axis=-1)


def remember(cache: Any, latent: mx.array, k_rope: mx.array) -> tuple[mx.array, mx.array]:
    """Extend a cache and return all its latents and keys, unpacked where the cache quantises."""
    narrow = k_rope if k_rope.shape[-1] else latent[..., :1]
    held = cache.update_and_fetch(latent, narrow)
    if not k_rope.shape[-1]:
        # One column stands in for the rotated key that there is none of.
        held = (held[0], mx.zeros((*held[0].shape[:-1], 0), k_rope.dtype))
    if not isinstance(cache, QuantizedKVCache):
        return held
    latents, keys = (
        mx.dequantize(packed, scales, biases, group_size=cache.group_size, bits=cache.bits)
        for packed, scales, biases in held
    )
    return latents, keys


def make_latent_attention(layer: LayerPlan, plan: Plan) -> LatentAttention:
    """The form of latent attention that the options ask for."""
    assert isinstance(layer.mixer, PluginMixerSpec)
    expanded = layer.mixer.options.get("expanded", False)
    return (ExpandedAttention if expanded else LatentAttention)(layer, plan)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `mla`."""
    return {"mla": make_latent_attention}
