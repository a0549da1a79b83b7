"""A decoder layer whose residual is the normed input, with a factor on each side of each sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Num, Spec


class Factors(Spec):
    """The two factors of a sum."""

    residual: Num = Field(1.0, description="Factor on the residual.")
    branch: Num = Field(1.0, description="Factor on the branch.")


class NormedResidualOptions(Spec):
    """Options of a layer with normed residuals."""

    mixer: dict[str, Factors] = Field(description="Factors around the mixer, by layer type.")
    mlp: Factors = Field(description="Factors around the MLP.")


class NormedResidualLayer(DecoderLayer):
    """``x = pre(x); x = a x + b mixer(x)``, and the same around the MLP.

    LanguageModel in transformers' ``models/minimax/modeling_minimax.py`` (MiniMaxDecoderLayer).

    Args:
        layer: the layer's plan; the block's options are :class:`NormedResidualOptions`.
        plan: the model's plan.
        fused: passed to the MoE block.

    Raises:
        SpecError: the options have no factors for the layer's type, or the layer lacks a mixer or an MLP.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__(layer, plan, fused)
        options = read_options(NormedResidualOptions, layer.block.options, "a layer with normed residuals")
        if layer.type not in options.mixer:
            raise SpecError(
                "a layer with normed residuals has no factors for its type",
                where="block.options.mixer",
                expected=layer.type,
                found=", ".join(options.mixer),
            )
        self.demand(layer, plan, "mixer", "mlp", "pre_mixer", "pre_mlp")
        self._around_mixer, self._around_mlp = options.mixer[layer.type], options.mlp

    def bind(self) -> Callable[[mx.array, ForwardState, Any], mx.array]:
        """The call as one function."""
        parts, around_mixer, around_mlp = self.parts(), self._around_mixer, self._around_mlp
        mixer, feed, pre_mixer, pre_mlp = parts.mixer, parts.feed, parts.pre_mixer, parts.pre_mlp
        assert mixer is not None
        assert feed is not None
        assert pre_mixer is not None
        assert pre_mlp is not None

        def run(x: mx.array, state: ForwardState, cache: Any) -> mx.array:
            x = pre_mixer(x)
            x = _sum(around_mixer, x, mixer(x, state, cache))
            x = pre_mlp(x)
            return _sum(around_mlp, x, feed(x))

        return run


def _sum(factors: Factors, residual: mx.array, branch: mx.array) -> mx.array:
    return residual * factors.residual + branch * factors.branch


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `normed_residual`."""
    return {"normed_residual": NormedResidualLayer}
