"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1), caching latents or full heads.

Legend: B batch, L tokens, T cached tokens, D model width, h heads, n / r / v widths of a head without
position, with position and of values, c latent width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.models.mla import MultiLinear
from pydantic import Field

from mlx_experts.engine.layers.attention import query_temperature
from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.rope import Rope, yarn_mscale
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan, RopePlan
from mlx_experts.registry.spec.family import OutputGateSpec, PluginMixerSpec, TemperatureSpec
from mlx_experts.registry.spec.values import Bool, Count, ModulePath, Positive, Spec, Width


class MlaOptions(Spec):
    """Options of latent attention."""

    q_rank: Count | None = Field(description="Latent width of queries; null or 0 for one full projection.")
    kv_rank: Width = Field(description="Latent width of keys and values.")
    nope_dim: Width = Field(description="Width of a query and key head that is not rotated.")
    rope_dim: Width = Field(description="Width of a query and key head that is rotated.")
    v_dim: Width = Field(description="Width of a value head.")
    bias: Bool = Field(False, description="Biases on the projections into latents and on the output.")
    eps: Positive = Field(1e-6, description="Epsilon of the norms on latents.")
    scale_q: Bool = Field(False, description="Queries are multiplied by sqrt(model width / q_rank).")
    scale_kv: Bool = Field(False, description="Latents are multiplied by sqrt(model width / kv_rank).")
    expanded: bool = Field(False, description="Full keys and values are cached, and kv_b_proj is kept whole.")
    out: ModulePath = Field("o_proj", description="Leaf of the output projection.")
    gate: OutputGateSpec | None = Field(None, description="Gate on the output, with a projection of its own.")
    temperature: TemperatureSpec | None = Field(None, description="Query scale by position.")


class LatentAttention(Mixer):
    """Latent attention after transformers' ``models/deepseek_v3/modeling_deepseek_v3.py``.

    The cache holds the normed latent and the one rotated key that all heads share. One token attends to
    latents, with the key's up-projection moved to the query (``embed_q``) and the value's to the output
    (``unembed_out``); more tokens expand the latents first, which takes fewer operations.

    Args:
        layer: the layer's plan; the mixer's options are :class:`MlaOptions`.
        plan: the model's plan.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(self.options_kind(), layer, "latent attention")
        self.heads, self.width = layer.sizes.num_heads, layer.sizes.hidden_size
        self.scale = softmax_scale(spec.nope_dim + spec.rope_dim, layer.rope)
        self._rope = Rope(layer.rope, spec.rope_dim) if layer.rope is not None else None
        self._build(spec)

    @classmethod
    def options_kind(cls) -> type[MlaOptions]:
        """The model that the mixer's options are read into."""
        return MlaOptions

    def _build(self, spec: MlaOptions) -> None:
        width, q_width = self.width, self.heads * (spec.nope_dim + spec.rope_dim)
        if not spec.q_rank:
            self.q_proj = nn.Linear(width, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, spec.q_rank, bias=spec.bias)
            self.q_a_layernorm = nn.RMSNorm(spec.q_rank, eps=spec.eps)
            self.q_b_proj = nn.Linear(spec.q_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, spec.kv_rank + spec.rope_dim, bias=spec.bias)
        self.kv_a_layernorm = nn.RMSNorm(spec.kv_rank, eps=spec.eps)
        self._build_up_projections(spec)
        place(self, spec.out, nn.Linear(self.heads * spec.v_dim, width, bias=spec.bias))
        if spec.gate is not None and spec.gate.enabled:
            per_head = spec.v_dim if spec.gate.over == "element" else 1
            place(self, spec.gate.path or "g_proj", nn.Linear(width, self.heads * per_head, bias=False))

    def _build_up_projections(self, spec: MlaOptions) -> None:
        self.embed_q = MultiLinear(spec.nope_dim, spec.kv_rank, self.heads)
        self.unembed_out = MultiLinear(spec.kv_rank, spec.v_dim, self.heads)

    def query_latent(self, x: mx.array) -> mx.array:
        """What queries are made of: the normed latent [B, L, q_rank], or ``x`` where there is none."""
        return x if not self._spec.q_rank else self.q_a_layernorm(self.q_a_proj(x))

    def queries(self, latent: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """Queries without and with position, [B, h, L, n] and [B, h, L, r], the latter rotated."""
        spec, (B, L, _) = self._spec, latent.shape
        q = self.q_b_proj(latent) if spec.q_rank else self.q_proj(latent)
        q = q.reshape(B, L, self.heads, -1).swapaxes(1, 2)
        if spec.scale_q and spec.q_rank:
            q = q * (self.width / spec.q_rank) ** 0.5
        if spec.temperature is not None and spec.temperature.enabled:
            q = q * query_temperature(spec.temperature, offset, L, q.dtype)
        nope, rope = mx.split(q, [spec.nope_dim], axis=-1)
        return nope, rope if self._rope is None else self._rope(rope, offset)

    def latents(self, x: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """The latent [B, 1, L, c] of keys and values, and the shared rotated key [B, 1, L, r]."""
        spec = self._spec
        latent, rope = mx.split(self.kv_a_proj_with_mqa(x), [spec.kv_rank], axis=-1)
        latent, rope = self.kv_a_layernorm(latent)[:, None], rope[:, None]
        if spec.scale_kv:
            latent = latent * (self.width / spec.kv_rank) ** 0.5
        return latent, rope if self._rope is None else self._rope(rope, offset)

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        offset = cache.offset if cache is not None else 0
        mask = state.attention_mask(x, cache)
        queries = self.queries(self.query_latent(x), offset)
        return self.output(self.attend(*queries, *self.latents(x, offset), mask, cache), x)

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
            scores = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2)
            if mask is not None:
                scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
            out = mx.fast.scaled_dot_product_attention(
                self.embed_q(q_nope), latent, latent, scale=self.scale, mask=scores
            )
            return self.unembed_out(out)
        k_nope, values = self.embed_q(latent, transpose=False), self.unembed_out(latent)
        return mx.fast.scaled_dot_product_attention(
            mx.concatenate([q_nope, q_rope], axis=-1),
            joined(k_nope, k_rope),
            values,
            scale=self.scale,
            mask=mask,
        )

    def output(self, out: mx.array, x: mx.array) -> mx.array:
        """Gate and project the attention output [B, h, L, v] to [B, L, D]."""
        gate, out = self._spec.gate, out.swapaxes(1, 2)
        if gate is not None and gate.enabled:
            logits = find(self, gate.path or "g_proj")(x).astype(mx.float32)
            factor = mx.sigmoid(logits) if gate.function == "sigmoid" else nn.softplus(logits)
            out = out * factor.reshape(*out.shape[:-1], -1).astype(out.dtype)
        return find(self, self._spec.out)(out.flatten(-2))

    def cuts(self) -> Cuts:
        """Each rank keeps some of the heads; latents, and what makes them, stay whole."""
        spec = self._spec
        rows: dict[str, list[int] | int] = {"q_b_proj" if spec.q_rank else "q_proj": 1}
        if spec.gate is not None and spec.gate.enabled:
            rows[spec.gate.path or "g_proj"] = 1
        more, heads = self._up_projections()
        return Cuts({"heads": "heads of latent attention"}, {**rows, **more}, (spec.out,), heads)

    def _up_projections(self) -> tuple[dict[str, list[int] | int], tuple[str, ...]]:
        """Linear layers with rows, and stacks with an axis, of heads."""
        return {}, ("embed_q", "unembed_out")

    def make_cache(self) -> Any:
        """A cache of latents and rotated keys."""
        return KVCache()


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
    held = cache.update_and_fetch(latent, k_rope)
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
