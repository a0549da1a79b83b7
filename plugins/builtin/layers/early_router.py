"""A decoder layer whose experts are picked by its input, before the mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_experts.engine.layers.decode.layer_parts import as_it_is
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.decoder import DecoderLayer, refuse_parallel
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan


class EarlyRouterLayer(DecoderLayer):
    """``h = x + mixer(pre(x)); h + experts(pre(h))``, routed by ``x`` (SmallThinker, arXiv 2507.20984).

    Raises:
        SpecError: the layer has parallel branches.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__(layer, plan, fused)
        refuse_parallel(layer, plan)

    def bind(self) -> Callable[[mx.array, ForwardState, Any], mx.array]:
        """The call as one function; a layer without experts is the standard one."""
        parts = self.parts()
        mixer, experts = parts.mixer, parts.mlp
        if mixer is None or not isinstance(experts, MoE):
            return super().bind()
        pre_mixer, pre_mlp = parts.pre_mixer or as_it_is, parts.pre_mlp or as_it_is

        def run(x: mx.array, state: ForwardState, cache: Any) -> mx.array:
            h = x + mixer(pre_mixer(x), state, cache)
            return h + experts.routed(pre_mlp(h), x)

        return run


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `early_router`."""
    return {"early_router": EarlyRouterLayer}
