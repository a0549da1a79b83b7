"""The gated delta net: linear attention whose state forgets and corrects itself (Yang et al. 2024).

Legend: B batch, L tokens, D model width, g key heads, h value heads, r = h / g.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import precise_swiglu
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from pydantic import Field

from mlx_experts.engine.kernels.activations import apply, make
from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.conv import causal_conv, make_causal_conv
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Spec, Str, Width


class GatedDeltaOptions(Spec):
    """Options of a gated delta net."""

    key_heads: Width = Field(description="Query and key heads.")
    value_heads: Width = Field(description="Value heads, a multiple of the key heads.")
    key_dim: Width = Field(description="Width of a query and key head.")
    value_dim: Width = Field(description="Width of a value head.")
    kernel: Width = Field(description="Width of the convolution.")
    activation: Str = Field("silu", description="Activation after the convolution.")
    gate: Literal["silu", "sigmoid"] = Field("silu", description="Function of the output gate.")
    packing: Literal["by_key_head", "apart"] = Field(
        description="Two projections with the rows of each key head together, [q, k, v, z] and [b, a]; "
        "or one for [q, k, v] and one each for z, b and a."
    )


class GatedDelta(RecurrentMixer):
    """A gated delta net, after transformers' ``models/qwen3_next/modeling_qwen3_next.py``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`GatedDeltaOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: the value heads cannot be divided among the key heads.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("A_log",)

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        spec = mixer_options(GatedDeltaOptions, layer, "a gated delta net")
        problem = "the value heads cannot be divided among the key heads"
        check_parts(spec.value_heads, spec.key_heads, problem, layer.index)
        self._spec, width = spec, layer.sizes.hidden_size
        self._keys, self._values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        mixed = 2 * self._keys + self._values
        if spec.packing == "by_key_head":
            self.in_proj_qkvz = nn.Linear(width, mixed + self._values, bias=False)
            self.in_proj_ba = nn.Linear(width, 2 * spec.value_heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(width, mixed, bias=False)
            self.in_proj_z = nn.Linear(width, self._values, bias=False)
            self.in_proj_b = nn.Linear(width, spec.value_heads, bias=False)
            self.in_proj_a = nn.Linear(width, spec.value_heads, bias=False)
        self.conv1d = make_causal_conv(mixed, spec.kernel, bias=False)
        self._activation = make(spec.activation)
        self.dt_bias = mx.ones((spec.value_heads,))
        self.A_log = mx.zeros((spec.value_heads,))
        self.norm = nn.RMSNorm(spec.value_dim, eps=layer.sizes.norm_eps)
        self.out_proj = nn.Linear(self._values, width, bias=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths of the linear layers that read the mixer's input."""
        if self._spec.packing == "apart":
            return "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
        return "in_proj_qkvz", "in_proj_ba"

    def _parts(self, rows: Sequence[mx.array]) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """``[q, k, v]`` [B, L, C], ``z`` [B, L, h, dv], and the gates ``b`` and ``a`` [B, L, h]."""
        spec, (B, L, _) = self._spec, rows[0].shape
        if spec.packing == "apart":
            qkv, z, b, a = rows
            return qkv, z.reshape(B, L, spec.value_heads, spec.value_dim), b, a
        ratio = spec.value_heads // spec.key_heads
        cuts = [spec.key_dim, 2 * spec.key_dim, 2 * spec.key_dim + ratio * spec.value_dim]
        parts = mx.split(mx.unflatten(rows[0], -1, (spec.key_heads, -1)), cuts, axis=-1)
        qkv = mx.concatenate([part.flatten(-2) for part in parts[:3]], axis=-1)
        b, a = mx.split(mx.unflatten(rows[1], -1, (spec.key_heads, -1)), [ratio], axis=-1)
        z = parts[3].reshape(B, L, spec.value_heads, spec.value_dim)
        return qkv, z, b.flatten(-2), a.flatten(-2)

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, h * dv]."""
        spec, (B, L, _) = self._spec, rows[0].shape
        dtype = rows[0].dtype
        qkv, z, b, a = self._parts(rows)
        qkv = apply(self._activation, None, causal_conv(self.conv1d, qkv, mask, cache))
        q, k, v = mx.split(qkv, [self._keys, 2 * self._keys], axis=-1)
        q, k = (t.reshape(B, L, spec.key_heads, spec.key_dim) for t in (q, k))
        q, k = normalize_qk(q, k, inv_scale=spec.key_dim**-0.5, eps=1e-6)
        out, memory = gated_delta_update(
            q,
            k,
            v.reshape(B, L, spec.value_heads, spec.value_dim),
            # The decay is an exponential of an exponential: float32, as the original computes it.
            a.astype(mx.float32),
            b,
            self.A_log,
            self.dt_bias,
            cache[1] if cache is not None else None,
            mask,
            use_kernel=not self.training,
        )
        if cache is not None:
            cache[1] = memory
        if spec.gate == "silu":
            out = precise_swiglu(z, z, self.norm(out))
        else:
            out = (self.norm(out).astype(mx.float32) * mx.sigmoid(z.astype(mx.float32))).astype(dtype)
        return out.flatten(-2)

    def delta_step(self) -> DeltaStep | None:
        """The part between the linear layers as the GPU kernel takes it."""
        spec = self._spec
        if spec.activation != "silu":
            return None
        return DeltaStep(
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            kernel=spec.kernel,
            by_key_head=spec.packing == "by_key_head",
            gate=spec.gate,
            eps=self.norm.eps,
            conv=self.conv1d.weight,
            decay=self.A_log,
            shift=self.dt_bias,
            norm=self.norm.weight,
        )

    def make_cache(self) -> ArraysCache:
        """The convolution's last inputs and the state ``[B, h, dv, dk]`` in float32."""
        return ArraysCache(size=2)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `gated_delta`."""
    return {"gated_delta": GatedDelta}
