"""Kimi delta attention: a gated delta net with one decay for every key channel (Kimi Team 2025).

Legend: B batch, L tokens, D model width, h heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from pydantic import Field

from mlx_experts.engine.kernels.activations import apply, make
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.conv import causal_conv, make_causal_conv
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Num, Spec, Str, Width


class KimiDeltaOptions(Spec):
    """Options of Kimi delta attention."""

    heads: Width = Field(description="Heads.")
    head_dim: Width = Field(description="Width of a head.")
    kernel: Width = Field(description="Width of the convolutions.")
    low_rank: bool = Field(description="Decay and output gate go through the width of one head.")
    convolutions: Literal["conv.conv", "conv1d"] = Field(
        description="What follows `q_`, `k_` and `v_` in the names of the convolutions."
    )
    broadcast_decay: bool = Field(False, description="The decay rates are stored as [1, 1, h, 1].")
    safe_gate: Bool = Field(False, description="Whether the log decay is bounded from below.")
    lower_bound: Num = Field(-5.0, description="That bound.")
    activation: Str = Field("silu", description="Activation after the convolutions.")


class KimiDelta(RecurrentMixer):
    """Kimi delta attention, after transformers' ``models/kimi_linear/modeling_kimi_linear.py``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`KimiDeltaOptions`.
        plan: the model's plan.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(KimiDeltaOptions, layer, "Kimi delta attention")
        self._activation = make(spec.activation)
        width, inner = layer.sizes.hidden_size, spec.heads * spec.head_dim
        for name in "qkv":
            place(self, f"{name}_proj", nn.Linear(width, inner, bias=False))
            place(self, f"{name}_{spec.convolutions}", make_causal_conv(inner, spec.kernel, bias=False))
        for name in "fg":
            if spec.low_rank:
                place(self, f"{name}_a_proj", nn.Linear(width, spec.head_dim, bias=False))
                place(self, f"{name}_b_proj", nn.Linear(spec.head_dim, inner, bias=False))
            else:
                place(self, f"{name}_proj", nn.Linear(width, inner, bias=False))
        self.b_proj = nn.Linear(width, spec.heads, bias=False)
        self.A_log = mx.zeros((1, 1, spec.heads, 1) if spec.broadcast_decay else (spec.heads,))
        self.dt_bias = mx.zeros((inner,))
        self.o_norm = nn.RMSNorm(spec.head_dim, eps=layer.sizes.norm_eps)
        self.o_proj = nn.Linear(inner, width, bias=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths of the linear layers that read the mixer's input."""
        rank = "_a" if self._spec.low_rank else ""
        return "q_proj", "k_proj", "v_proj", f"f{rank}_proj", f"g{rank}_proj", "b_proj"

    @property
    def output(self) -> str:
        """Path of the linear layer that makes what is added to the stream."""
        return "o_proj"

    def _through(self, name: str, row: mx.array) -> mx.array:
        """The decay (`f`) or the output gate (`g`) from its projection, [B, L, h, d]."""
        y = self[f"{name}_b_proj"](row) if self._spec.low_rank else row
        return mx.unflatten(y, -1, (self._spec.heads, self._spec.head_dim))

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, h * d]."""
        spec = self._spec
        shape = (spec.heads, spec.head_dim)
        decay, opened, beta = rows[3:]
        mixed = []
        for slot, name in enumerate("qkv"):
            conv = find(self, f"{name}_{spec.convolutions}")
            y = causal_conv(conv, rows[slot], mask, cache, slot)
            mixed.append(mx.unflatten(apply(self._activation, None, y), -1, shape))
        q, k = normalize_qk(mixed[0], mixed[1], inv_scale=spec.head_dim**-0.5, eps=1e-6)
        out, memory = gated_delta_update(
            q,
            k,
            mixed[2],
            self._through("f", decay).astype(mx.float32),
            beta.astype(mx.float32),
            self.A_log.reshape(spec.heads, 1).astype(mx.float32),
            self.dt_bias.reshape(shape).astype(mx.float32),
            cache[3] if cache is not None else None,
            mask,
            use_kernel=not self.training,
            lower_bound=spec.lower_bound if spec.safe_gate else None,
        )
        if cache is not None:
            cache[3] = memory
        gate = mx.sigmoid(self._through("g", opened).astype(mx.float32))
        normed = self.o_norm(out.astype(mx.float32))
        return (normed * gate).astype(rows[0].dtype).flatten(-2)

    def make_cache(self) -> ArraysCache:
        """The last inputs of three convolutions, and the state ``[B, h, d, d]`` in float32."""
        return ArraysCache(size=4)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `kimi_delta`."""
    return {"kimi_delta": KimiDelta}
