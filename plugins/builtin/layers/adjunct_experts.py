"""A decoder layer in which groups of experts have a small expert of their own beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchGLU
from pydantic import Field

from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch, current_device
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.layers.options import check_parts, read_options
from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import ModulePath, Num, Spec, Width


class AdjunctOptions(Spec):
    """Options of experts with adjuncts."""

    path: ModulePath = Field(description="Container of the adjuncts, from the MoE module.")
    width: Width = Field(description="Inner width of an adjunct.")
    group: Width = Field(description="Neighbouring experts that share one.")
    scale: Num = Field(1.0, description="Factor on their weighted sum.")


class AdjunctLayer(DecoderLayer):
    """The standard layer, whose picked experts each bring their group's adjunct with the same weight.

    The source is the Grove MoE report (arXiv 2508.07785): a group that is picked twice counts twice.

    Args:
        layer: the layer's plan; the block's options are :class:`AdjunctOptions`.
        plan: the model's plan.
        fused: passed to the MoE block.

    Raises:
        ConfigError: the experts cannot be divided into groups.
        SpecError: the layer has experts and lacks a mixer or a norm.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__(layer, plan, fused)
        self._adjuncts: AdjunctOptions | None = None
        experts = find(self, layer.moe.path) if layer.moe is not None else None
        if not isinstance(experts, MoE):
            return
        self.demand(layer, plan, "mixer", "mlp", "pre_mixer", "pre_mlp")
        spec = self._adjuncts = read_options(AdjunctOptions, layer.block.options, "experts with adjuncts")
        check_parts(experts.experts, spec.group, "the experts cannot be divided into groups", layer.index)
        place(
            experts, spec.path, SwitchGLU(layer.sizes.hidden_size, spec.width, experts.experts // spec.group)
        )
        self._adjunct_dispatch = ExpertDispatch(f"{experts.name}.{spec.path}", experts.activation, fused)

    def bind(self) -> Callable[[mx.array, ForwardState, Any], mx.array]:
        """The call as one function; a layer without experts is the standard one."""
        spec = self._adjuncts
        if spec is None:
            return super().bind()
        parts = self.parts()
        mixer, experts, pre_mixer, pre_mlp = parts.mixer, parts.mlp, parts.pre_mixer, parts.pre_mlp
        adjuncts = self._adjunct_dispatch.bind(find(experts, spec.path))

        def run(x: mx.array, state: ForwardState, cache: Any) -> mx.array:
            h = x + mixer(pre_mixer(x), state, cache)
            y = pre_mlp(h)
            if not y.size:
                return h
            indices, weights = experts.route(y)
            wide = y.astype(mx.float32)
            beside = adjuncts(wide, indices // spec.group, weights * spec.scale, current_device())[0]
            return h + (experts.total(y) + beside).astype(h.dtype)

        return run


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `adjunct_experts`."""
    return {"adjunct_experts": AdjunctLayer}
