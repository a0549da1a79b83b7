"""What a router gives a stateful MoE block.

Legend: E routed experts, K experts per token, S shared experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.router import Router
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import RouterSpec


@dataclass(frozen=True, eq=False)
class Routed:
    """What tokens picked.

    Args:
        indices: ``[..., K]``.
        weights: ``[..., K]`` in float32.
        shared: weights ``[..., S]`` of the shared experts in float32, where the router gives any.
    """

    indices: mx.array
    weights: mx.array
    shared: mx.array | None = None


Routing = Callable[[mx.array, ForwardState], Routed]


class StatefulRouter(Router):
    """A router whose calls take the forward state.

    Args:
        spec: the resolved section.
        layer: the layer's plan.
    """

    def __init__(self, spec: RouterSpec, layer: LayerPlan) -> None:
        sizes = layer.sizes
        super().__init__(spec, sizes.hidden_size, sizes.num_experts, sizes.top_k, sizes.norm_eps)
        self.layer = layer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spec, self.layer), {"fused": self.fused}

    def route(self, moe: nn.Module) -> Routing:
        """The router's call with the leaves that are in ``moe`` now."""
        raise NotImplementedError
