"""Mamba-2: a selective state space with one decay for each head (Dao and Gu 2024).

Legend: B batch, L tokens, D model width, h heads, p head width, g groups, n state size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.ssm import ssm_attn, ssm_update
from pydantic import Field

from mlx_experts.engine.kernels.activations import apply, make
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.conv import causal_conv, make_causal_conv
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Spec, Str, Width


class Mamba2Options(Spec):
    """Options of a Mamba-2 mixer."""

    heads: Width = Field(description="Heads, a multiple of the groups.")
    head_dim: Width | Literal["auto"] = Field(
        description="Width of a head; `auto` divides the expanded width by the heads."
    )
    expand: Width = Field(2, description="Expanded width over the model's, for an automatic head width.")
    groups: Width = Field(description="Groups of heads that share their input and output vectors.")
    state: Width = Field(description="State size of each channel.")
    kernel: Width = Field(description="Width of the convolution.")
    conv_bias: Bool = Field(description="Whether the convolution has a bias.")
    bias: Bool = Field(description="Biases on the input and output projections.")
    step_limit: tuple[float, float] = Field((0.0, float("inf")), description="Bounds of the time step.")
    activation: Str = Field("silu", description="Activation after the convolution.")


class GroupedGatedNorm(nn.Module):
    """``rms(x * silu(gate)) * weight``, normalised inside each of ``groups`` equal parts of the width."""

    def __init__(self, dims: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._groups, self._eps = groups, eps

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        gated = x.astype(mx.float32) * nn.silu(gate.astype(mx.float32))
        parts = mx.unflatten(gated, -1, (self._groups, -1))
        return self.weight * mx.fast.rms_norm(parts, None, self._eps).flatten(-2).astype(x.dtype)


class Mamba2(RecurrentMixer):
    """A Mamba-2 mixer, after transformers' ``models/nemotron_h/modeling_nemotron_h.py``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`Mamba2Options`.
        plan: the model's plan.

    Raises:
        ConfigError: the heads cannot be divided into that many groups, or the width among the heads.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("A_log",)

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        spec = mixer_options(Mamba2Options, layer, "a Mamba-2 mixer")
        problem = "the heads of a state space cannot be divided into that many groups"
        check_parts(spec.heads, spec.groups, problem, layer.index)
        self._spec, width = spec, layer.sizes.hidden_size
        if spec.head_dim == "auto":
            problem = "the expanded width cannot be divided among the heads of a state space"
            check_parts(spec.expand * width, spec.heads, problem, layer.index)
        self._head_dim = spec.expand * width // spec.heads if spec.head_dim == "auto" else spec.head_dim
        self._activation = make(spec.activation)
        self._inner, self._vectors = spec.heads * self._head_dim, spec.groups * spec.state
        mixed = self._inner + 2 * self._vectors
        self.in_proj = nn.Linear(width, self._inner + mixed + spec.heads, bias=spec.bias)
        self.conv1d = make_causal_conv(mixed, spec.kernel, spec.conv_bias)
        self.dt_bias = mx.ones((spec.heads,))
        self.A_log = mx.zeros((spec.heads,))
        self.D = mx.ones((spec.heads,))
        self.norm = GroupedGatedNorm(self._inner, spec.groups, layer.sizes.norm_eps)
        self.out_proj = nn.Linear(self._inner, width, bias=spec.bias)
        # mlx-lm's Metal kernel for one token spreads a state over 32 lanes.
        self._update = ssm_update if spec.state % 32 == 0 else ssm_attn

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, h * p]."""
        spec, (B, L, _) = self._spec, rows[0].shape
        cuts = [self._inner, 2 * self._inner + 2 * self._vectors]
        gate, mixed, dt = mx.split(rows[0], cuts, axis=-1)
        mixed = apply(self._activation, None, causal_conv(self.conv1d, mixed, mask, cache))
        h, b, c = mx.split(mixed, [self._inner, self._inner + self._vectors], axis=-1)
        out, memory = self._update(
            h.reshape(B, L, spec.heads, self._head_dim),
            self.A_log.astype(mx.float32),
            b.reshape(B, L, spec.groups, spec.state),
            c.reshape(B, L, spec.groups, spec.state),
            self.D.astype(h.dtype),
            dt,
            self.dt_bias,
            cache[1] if cache is not None else None,
            spec.step_limit,
            mask=mask,
            lengths=cache.lengths if cache is not None else None,
        )
        if cache is not None:
            cache[1] = memory
        y: mx.array = self.norm(out.flatten(-2), gate)
        return y

    def make_cache(self) -> ArraysCache:
        """The convolution's last inputs and the state ``[B, h, p, n]``."""
        return ArraysCache(size=2)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `mamba2`."""
    return {"mamba2": Mamba2}
