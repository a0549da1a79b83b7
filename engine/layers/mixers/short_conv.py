"""The gated short convolution of the LFM2 models: a mixer that sees a few tokens back.

Legend: B batch, L tokens, D model width, K kernel width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from pydantic import Field

from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.conv import causal_conv, make_causal_conv
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Spec, Width


class ShortConvOptions(Spec):
    """Options of a gated short convolution."""

    kernel: Width = Field(description="Width of the convolution.")
    bias: Bool = Field(description="Biases on the projections and the convolution.")


class ShortConv(RecurrentMixer):
    """``out(c * conv(b * h))`` with ``[b, c, h] = in(x)``, after transformers' ``models/lfm2_moe``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`ShortConvOptions`.
        plan: the model's plan.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        spec = mixer_options(ShortConvOptions, layer, "a short convolution")
        width = layer.sizes.hidden_size
        self.conv = make_causal_conv(width, spec.kernel, spec.bias)
        self.in_proj = nn.Linear(width, 3 * width, bias=spec.bias)
        self.out_proj = nn.Linear(width, width, bias=spec.bias)

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, D]."""
        b, c, h = mx.split(rows[0], 3, axis=-1)
        return c * causal_conv(self.conv, b * h, mask, cache)

    def make_cache(self) -> ArraysCache:
        """The convolution's last K - 1 inputs."""
        return ArraysCache(size=1)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `short_conv`."""
    return {"short_conv": ShortConv}
