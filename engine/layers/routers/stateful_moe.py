"""The Mixture-of-Experts block whose router reads the forward state, and may weigh the shared experts.

Legend: B batch, L tokens, D model width, K experts per token, S shared experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_experts.engine.dispatch.expert_dispatch import BoundExperts, ExpertDispatch, current_device
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mlp import activation_of
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.moe import MoE, MoESteps
from mlx_experts.engine.layers.router import Router
from mlx_experts.engine.layers.routers.base import StatefulRouter
from mlx_experts.plugins.manager import components
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import SharedSpec


def stateful_router(layer: LayerPlan) -> StatefulRouter | None:
    """A layer's router of another kind than the standard one, or None."""
    assert layer.moe is not None
    spec = layer.moe.router
    if spec.kind == "standard":
        return None
    router: StatefulRouter | None = components().get("router", spec.kind)(spec, layer)
    return router


class StatefulMoE(MoE):
    """Routes by the forward state; otherwise as :class:`MoE`.

    Shared experts that the router weighs stand in a stack of their own and run as routed ones do.

    Args:
        layer: the layer's plan, with a resolved MoE section.
        name: module path of the block, by which the trace counts.
        fused: True or False to force or forbid the fused path; None for the policy.
        router: the layer's router.

    Raises:
        ConfigError: the section has what such a block does not know.
    """

    def __init__(self, layer: LayerPlan, name: str, fused: bool | None, router: StatefulRouter) -> None:
        self._made_router = router
        super().__init__(layer, name, fused)
        spec = self._spec
        if self._latent or spec.experts.zero_experts or spec.experts.apply_router_weight_on_input:
            raise ConfigError(
                f"a router of kind '{spec.router.kind}' fits no latent, identity or input-weighted experts",
                where="the family file, moe",
            )
        self._weighed = self._shared is not None and self._shared.combine == "router"
        self._shared_dispatch = ExpertDispatch(f"{name}.shared", self.activation, fused)

    def _make_router(self, layer: LayerPlan, columns: int) -> Router:
        return self._made_router

    def _make_shared(self, spec: SharedSpec, dims: int) -> nn.Module:
        if spec.combine != "router":
            return super()._make_shared(spec, dims)
        activation_of(spec.activation, spec.kind == "glu")
        return SwitchGLU(dims, spec.width, spec.count, bias=spec.bias)

    def use_fused(self, fused: bool | None) -> None:
        """Force, forbid or leave to the policy the fused path of this block from now on."""
        super().use_fused(fused)
        self._shared_dispatch = self._shared_dispatch.fresh(fused=fused)

    def use_activations(self, activations: str | None) -> None:
        """What the CPU's kernel multiplies activations as; None leaves it to the environment."""
        super().use_activations(activations)
        self._shared_dispatch = self._shared_dispatch.fresh(activations=activations)

    def __call__(
        self, x: mx.array, shared: nn.Module | None = None, state: ForwardState | None = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D].

        Args:
            shared: the shared expert, where it lives in the layer and not in this block.
            state: of the forward pass.
        """
        steps: MoESteps = self.steps()
        if steps.lent is not shared:
            steps = self.lend(shared)
        run: Callable[..., mx.array] = steps.run
        return run(x, state)

    def _bind_with(self, shared: nn.Module | None, lent: nn.Module | None) -> MoESteps:
        route, container = self._made_router.route(self), find(self, self._spec.experts.path)
        scale, group = self._spec.experts.output_scale, self._group
        modules = self.beside(shared) if shared is not None and not self._weighed else None
        experts = self._dispatch.bind(container, modules)
        sinks = self._shared_dispatch.bind(shared) if self._weighed and shared is not None else None
        join, plain = self.bind_join(), group is None and scale == 1.0

        def run(x: mx.array, state: ForwardState) -> mx.array:
            if not x.size:
                return mx.zeros_like(x)
            routed, device = route(x, state), current_device()
            if plain and (shared is None or modules is not None):
                y, added = experts(x, routed.indices, routed.weights, device)
                if added or shared is None:
                    return y
            else:
                inner, weights = x.astype(mx.float32), routed.weights
                if group is not None:
                    inner, weights = (sum_gradients(group)(each) for each in (inner, weights))
                y = experts(inner, routed.indices, weights, device)[0]
                if group is not None:
                    y = mx.distributed.all_sum(y, group=group)
                y = y if scale == 1.0 else y * scale
            wide = x.astype(mx.float32)
            if shared is None:
                return y.astype(x.dtype)
            if sinks is None:
                return join(wide, y, shared(wide)).astype(x.dtype)
            assert routed.shared is not None
            return (y + _all(sinks, wide, routed.shared, device)).astype(x.dtype)

        router: Any = self._router.bind(self) if self._spec.router.kind == "token_table" else None
        bound = cast(Any, run)
        return MoESteps(router, bound, bound, bound, lent)


def _all(experts: BoundExperts, x: mx.array, weights: mx.array, device: Any) -> mx.array:
    """The weighted sum of every expert of a stack, by weights [..., S]."""
    indices = mx.broadcast_to(mx.arange(weights.shape[-1], dtype=mx.uint32), weights.shape)
    y: mx.array = experts(x, indices, weights, device)[0]
    return y
