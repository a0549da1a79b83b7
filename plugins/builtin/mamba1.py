"""Mamba: a selective state space with a decay for every channel and state (Gu and Dao 2023).

Legend: B batch, L tokens, D model width, C inner channels, n state size, r rank of the time step.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from pydantic import Field

from mlx_experts.engine.causal_conv import causal_conv, make_causal_conv
from mlx_experts.engine.mixer import Mixer
from mlx_experts.engine.options import read_options
from mlx_experts.engine.state import ForwardState
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve import LayerPlan, Plan
from mlx_experts.registry.schema import PluginMixerSpec
from mlx_experts.registry.values import Bool, Spec, Width


class Mamba1Options(Spec):
    """Options of a Mamba mixer."""

    expand: Width = Field(description="Inner channels for each channel of the model.")
    state: Width = Field(description="State size of each channel.")
    kernel: Width = Field(description="Width of the convolution.")
    rank: Width | Literal["auto"] = Field(
        description="Rank of the time step; `auto` for a 16th of the width."
    )
    conv_bias: Bool = Field(description="Whether the convolution has a bias.")
    bias: Bool = Field(description="Biases on the input and output projections.")


@mx.compile
def _step(memory: mx.array, decay: mx.array, drive: mx.array, c: mx.array) -> tuple[mx.array, mx.array]:
    """One token: the new state [B, C, n] and the output [B, C]."""
    memory = decay * memory + drive
    return memory, (memory * c[:, None, :]).sum(axis=-1)


class Mamba1(Mixer):
    """A Mamba mixer with norms on its time step and vectors, after transformers' ``models/jamba``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`Mamba1Options`.
        plan: the model's plan.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("A_log",)

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        assert isinstance(layer.mixer, PluginMixerSpec)
        spec = read_options(Mamba1Options, layer.mixer.options, "a Mamba mixer")
        width, eps = layer.sizes.hidden_size, layer.sizes.norm_eps
        inner = spec.expand * width
        rank = math.ceil(width / 16) if spec.rank == "auto" else spec.rank
        self._cuts = [rank, rank + spec.state]
        self.in_proj = nn.Linear(width, 2 * inner, bias=spec.bias)
        self.conv1d = make_causal_conv(inner, spec.kernel, spec.conv_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * spec.state, bias=False)
        self.dt_proj = nn.Linear(rank, inner, bias=True)
        self.A_log = mx.log(mx.broadcast_to(mx.arange(1.0, spec.state + 1), (inner, spec.state)))
        self.D = mx.ones((inner,))
        self.out_proj = nn.Linear(inner, width, bias=spec.bias)
        self.dt_layernorm = nn.RMSNorm(rank, eps=eps)
        self.b_layernorm = nn.RMSNorm(spec.state, eps=eps)
        self.c_layernorm = nn.RMSNorm(spec.state, eps=eps)

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        mask = state.recurrent_mask(x, cache)
        h, gate = mx.split(self.in_proj(x), 2, axis=-1)
        h = nn.silu(causal_conv(self.conv1d, h, mask, cache))
        dt, b, c = mx.split(self.x_proj(h), self._cuts, axis=-1)
        dt = nn.softplus(self.dt_proj(self.dt_layernorm(dt)).astype(mx.float32))
        if mask is not None:
            # No time passes at a padded position, so that it leaves the state alone.
            dt = mx.where(mask[..., None], dt, 0)
        y, memory = self._scan(h.astype(mx.float32), dt, self.b_layernorm(b), self.c_layernorm(c), cache)
        if cache is not None:
            cache[1] = memory
            cache.advance(x.shape[1])
        y = (y + self.D.astype(mx.float32) * h.astype(mx.float32)).astype(x.dtype)
        return self.out_proj(y * nn.silu(gate))

    def _scan(
        self, h: mx.array, dt: mx.array, b: mx.array, c: mx.array, cache: Any
    ) -> tuple[mx.array, mx.array]:
        """Outputs [B, L, C] and the last state [B, C, n], both in float32."""
        a = -mx.exp(self.A_log.astype(mx.float32))
        b, c = b.astype(mx.float32), c.astype(mx.float32)
        memory = cache[1] if cache is not None else None
        if memory is None:
            memory = mx.zeros((h.shape[0], *a.shape), dtype=mx.float32)
        outputs = []
        for t in range(h.shape[1]):
            step = dt[:, t, :, None]
            drive = step * h[:, t, :, None] * b[:, t, None, :]
            memory, out = _step(memory, mx.exp(step * a), drive, c[:, t])
            outputs.append(out)
        return mx.stack(outputs, axis=1), memory

    def make_cache(self) -> ArraysCache:
        """The convolution's last inputs and the state ``[B, C, n]``."""
        return ArraysCache(size=2)


@hookimpl
def offer_mixers() -> dict[str, Any]:
    """The mixer `mamba1`."""
    return {"mamba1": Mamba1}
