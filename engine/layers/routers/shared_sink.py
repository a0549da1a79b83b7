"""A router that scores the shared experts too: one softmax weighs them with the picked ones.

The source is transformers' ``models/inkling/modeling_inkling.py`` (TopkRouter). Legend: E routed experts,
K experts per token, S shared experts.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.layers.router import SCORES
from mlx_experts.engine.layers.routers.base import Routed, Routing, StatefulRouter
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.values import ModulePath, Spec, Width


class SharedSinkOptions(Spec):
    """Options of a router that scores the shared experts."""

    shared: Width = Field(description="Shared experts; their rows stand last in the router's matrix.")
    scale: ModulePath | None = Field(None, description="Leaf of a learned factor on all weights.")


class SharedSinkRouter(StatefulRouter):
    """Picks by sigmoid scores and a selection bias; weights are a softmax of log-sigmoids.

    Args:
        spec: the resolved section.
        layer: the layer's plan.
    """

    def __init__(self, spec: RouterSpec, layer: LayerPlan) -> None:
        super().__init__(spec, layer)
        self.options = read_options(SharedSinkOptions, spec.options, "a router that scores shared experts")
        self.routed_experts = self.experts
        self.experts += self.options.shared

    def build(self, moe: nn.Module) -> None:
        """Place the matrix of all experts, the selection bias of the routed ones, and the factor."""
        bias, self.bias_path = self.bias_path, None
        super().build(moe)
        self.bias_path = bias
        if bias:
            place(moe, bias, mx.zeros((self.routed_experts,), dtype=mx.float32))
        if self.options.scale is not None:
            place(moe, self.options.scale, mx.ones((1,)))

    def route(self, moe: nn.Module) -> Routing:
        """The call with the leaves that are in ``moe`` now."""
        spec, k, count = self.spec, self.top_k, self.routed_experts
        logits_of = self.bind(moe).logits
        leaves = [
            path.rpartition(".")[::2] if path else None for path in (self.bias_path, self.options.scale)
        ]
        bias, scale = ((find(moe, leaf[0]), leaf[1]) if leaf else None for leaf in leaves)

        def routed(x: mx.array, state: ForwardState) -> Routed:
            logits = logits_of(x)
            chosen = SCORES[spec.score](logits[..., :count])
            if bias is not None:
                chosen = chosen + bias[0][bias[1]]
            indices = mx.stop_gradient(mx.argpartition(-chosen, kth=k - 1, axis=-1)[..., :k])
            picked = mx.take_along_axis(logits, indices, axis=-1)
            both = mx.concatenate([picked, logits[..., count:]], axis=-1)
            # The softmax of log-sigmoids is each sigmoid's share of their sum.
            weights = mx.softmax(-mx.logaddexp(-both, 0.0), axis=-1) * spec.scale
            if scale is not None:
                weights = weights * scale[0][scale[1]].astype(mx.float32)
            return Routed(indices, weights[..., :k], weights[..., k:])

        return routed


@hookimpl
def register_routers() -> dict[str, Any]:
    """The router `shared_sink`."""
    return {"shared_sink": SharedSinkRouter}
