"""Lightning attention: linear attention whose heads forget at fixed rates (Qin et al. 2024).

Legend: B batch, L tokens, D model width, C tokens of a block, h heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from pydantic import Field

from mlx_experts.engine.kernels.activations import apply, make
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Leaf, Num, Positive, Spec, Str, Width

BLOCK = 128


class LightningNames(Spec):
    """Leaves of a lightning attention module."""

    qkv: Leaf = Field("qkv_proj", description="Projection to queries, keys and values.")
    out: Leaf = Field("out_proj", description="Output projection.")
    gate: Leaf = Field("output_gate", description="Projection to the gate of the output.")
    norm: Leaf = Field("norm", description="Norm of the output, before the gate.")
    q_norm: Leaf = Field("q_norm", description="Norm of the queries.")
    k_norm: Leaf = Field("k_norm", description="Norm of the keys.")


class LightningOptions(Spec):
    """Options of a lightning attention."""

    names: LightningNames = Field(LightningNames(), description="Leaf names.")
    head_dim: Width | None = Field(None, description="Width of a head; the size `head_dim` when absent.")
    packing: Literal["by_head", "apart"] = Field(
        description="Rows of the projection: [q, k, v] for each head, or all of q, all of k, all of v."
    )
    activation: Str | None = Field(None, description="Activation on queries, keys and values.")
    qkv_bias: Bool = Field(False, description="Biases on queries, keys and values.")
    out_bias: Bool = Field(False, description="Bias on the output projection.")
    qk_norm: Bool = Field(False, description="Whether the heads of queries and keys are normalised.")
    scaled: Bool = Field(False, description="Whether queries are multiplied by head_dim ** -0.5.")
    norm_groups: Width = Field(1, description="Parts of the width that the output norm treats apart.")
    norm_eps: Positive | None = Field(
        None, description="Epsilon of the output norm; the model's when absent."
    )
    rates: Literal["geometric", "alibi"] = Field(
        description="`2 ** (-8 i / heads)`, or ALiBi's, which differ where the heads are no power of two."
    )
    first: int = Field(0, description="Layer that forgets at the full rates; earlier ones forget faster.")
    spread: Num = Field(0.0, description="Added to the number of layers over which they fall.")


class GroupNorm(nn.Module):
    """RMSNorm inside each of ``groups`` equal parts of the width.

    Raises:
        ConfigError: the parts cannot be equal.
    """

    def __init__(self, dims: int, groups: int, eps: float) -> None:
        super().__init__()
        check_parts(dims, groups, "the width of a norm cannot be divided into that many groups")
        self.weight = mx.ones((dims,))
        self._groups, self._eps = groups, eps

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.unflatten(x, -1, (self._groups, -1))
        return self.weight * mx.fast.rms_norm(parts, None, self._eps).flatten(-2)


class Lightning(RecurrentMixer):
    """Lightning attention, after transformers' ``models/minimax/modeling_minimax.py``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`LightningOptions`.
        plan: the model's plan.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        spec = mixer_options(LightningOptions, layer, "a lightning attention")
        sizes = layer.sizes
        self._spec, self._heads, self._dim = spec, sizes.num_heads, spec.head_dim or sizes.head_dim
        width, inner, names = sizes.hidden_size, self._heads * self._dim, spec.names
        self[names.qkv] = nn.Linear(width, 3 * inner, bias=spec.qkv_bias)
        self[names.out] = nn.Linear(inner, width, bias=spec.out_bias)
        self[names.gate] = nn.Linear(width, inner, bias=False)
        eps = spec.norm_eps if spec.norm_eps is not None else sizes.norm_eps
        self[names.norm] = GroupNorm(inner, spec.norm_groups, eps)
        if spec.qk_norm:
            self[names.q_norm] = nn.RMSNorm(self._dim, eps=sizes.norm_eps)
            self[names.k_norm] = nn.RMSNorm(self._dim, eps=sizes.norm_eps)
        self._activation = None if spec.activation is None else make(spec.activation)
        self._rope = None
        if layer.rope is not None:
            self._rope = Rope(layer.rope, layer.rope.width(self._dim), self._dim)
        # Rates fall from the first layer to almost nothing in the last.
        span = max(1, sizes.num_layers - 1) + spec.spread
        share = 1.0 - (layer.index - spec.first) / span + 1e-5
        self._rates = mx.array([rate * share for rate in head_rates(self._heads, spec.rates == "alibi")])

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths of the linear layers that read the mixer's input."""
        return self._spec.names.qkv, self._spec.names.gate

    @property
    def output(self) -> str:
        """Path of the linear layer that makes what is added to the stream."""
        return self._spec.names.out

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, h * d]."""
        spec, names, (B, L, _) = self._spec, self._spec.names, rows[0].shape
        mixed, gate = rows
        if self._activation is not None:
            mixed = apply(self._activation, None, mixed)
        if spec.packing == "by_head":
            parts = mixed.reshape(B, L, self._heads, 3, self._dim)
            q, k, v = (parts[..., i, :].swapaxes(1, 2) for i in range(3))
        else:
            parts = mixed.reshape(B, L, 3, self._heads, self._dim)
            q, k, v = (parts[:, :, i].swapaxes(1, 2) for i in range(3))
        if spec.qk_norm:
            q, k = self[names.q_norm](q), self[names.k_norm](k)
        if self._rope is not None:
            offset = self._advance(mask, cache, B, L)
            q, k = self._rope(q, offset), self._rope(k, offset)
        if spec.scaled:
            q = q * self._dim**-0.5
        out, memory = decayed_attention(q, k, v, self._rates, cache[0] if cache is not None else None, mask)
        if cache is not None:
            cache[0] = memory
        out = self[names.norm](out.swapaxes(1, 2).flatten(-2).astype(gate.dtype))
        return out * mx.sigmoid(gate)

    def _advance(self, mask: mx.array | None, cache: Any, rows: int, length: int) -> int | mx.array:
        """Position of the first column of each row; the cache counts the tokens seen of each."""
        if cache is None:
            return 0
        seen = cache[1] if cache[1] is not None else mx.zeros((rows,), dtype=mx.int32)
        if mask is None:
            cache[1] = seen + length
            return seen
        cache[1] = seen + mask.sum(axis=1).astype(mx.int32)
        # Columns before the first real token of a row padded on the left have no position.
        return seen - mx.argmax(mask, axis=1).astype(mx.int32)

    def make_cache(self) -> ArraysCache:
        """The state ``[B, h, d, d]`` in float32 and, for a rotated mixer, the tokens seen ``[B]``."""
        return ArraysCache(size=1 if self._rope is None else 2)


def head_rates(heads: int, alibi: bool) -> list[float]:
    """Rates of decay, one for each head, before they fall with the layers.

    Args:
        alibi: take the rates of Press et al. 2022: those of the next lower power of two, then every
            second one of the next higher.
    """
    power = 2 ** math.floor(math.log2(heads)) if alibi else heads
    rates = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return rates + between[: heads - power]


def decayed_attention(
    q: mx.array, k: mx.array, v: mx.array, rates: mx.array, state: mx.array | None, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """``y_t = q_t S_t`` with ``S_t = exp(-rate) S_(t-1) + k_t^T v_t``, in blocks and in float32.

    Args:
        q, k, v: [B, h, L, d].
        rates: [h].
        state: [B, h, d, d], or None for zeros.
        mask: [B, L], False where a position neither adds nor decays; None when all are real.

    Returns:
        [B, h, L, d] and the state after the last position, both in float32.
    """
    q, k, v = (t.astype(mx.float32) for t in (q, k, v))
    B, _, L, d = q.shape
    if state is None:
        state = mx.zeros((B, q.shape[1], d, v.shape[-1]), dtype=mx.float32)
    rates = rates[None, :, None]
    if mask is not None:
        k = mx.where(mask[:, None, :, None], k, 0)
    outputs = []
    for start in range(0, L, BLOCK):
        q_C, k_C, v_C = (t[:, :, start : start + BLOCK] for t in (q, k, v))
        size = q_C.shape[2]
        # Real tokens up to each position of the block: decay counts these and not columns.
        if mask is None:
            age = mx.arange(1, size + 1, dtype=mx.float32)[None, None]
        else:
            age = mx.cumsum(mask[:, None, start : start + BLOCK].astype(mx.float32), axis=-1)
        apart = mx.maximum(age[..., :, None] - age[..., None, :], 0)
        weights = mx.tril(mx.exp(-rates[..., None] * apart) * (q_C @ k_C.swapaxes(-1, -2)))
        fresh = mx.exp(-rates * age)[..., None]
        outputs.append(weights @ v_C + (q_C * fresh) @ state)
        last = age[..., -1:]
        late = mx.exp(-rates * (last - age))[..., None]
        state = state * mx.exp(-rates * last)[..., None] + (k_C * late).swapaxes(-1, -2) @ v_C
    return mx.concatenate(outputs, axis=2), state


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `lightning`."""
    return {"lightning": Lightning}
