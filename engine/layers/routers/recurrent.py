"""A router that is a small MLP and adds what the layer before made of a token; its last pick does nothing.

The source is transformers' ``models/zaya/modeling_zaya.py`` (Router). Legend: E experts, K experts per token,
R width of the router.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.layers.router import SCORES, normalise
from mlx_experts.engine.layers.routers.base import Routed, Routing, StatefulRouter
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.values import Count, Spec, Width


class RecurrentOptions(Spec):
    """Options of a router with a memory."""

    width: Width = Field(description="Width of the router.")
    skips: Count = Field(0, description="Columns behind the experts that do nothing when they are picked.")


class RouterMLP(nn.Module):
    """``out(gelu(fc2(gelu(fc1(norm(h))))))``."""

    def __init__(self, width: int, columns: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=eps)
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.out_proj = nn.Linear(width, columns, bias=False)

    def __call__(self, h: mx.array) -> mx.array:
        """``h`` [..., R] to logits [..., columns]."""
        return self.out_proj(nn.gelu(self.fc2(nn.gelu(self.fc1(self.norm(h))))))


class RecurrentRouter(StatefulRouter):
    """Routes by an MLP over the layer's input and the memory of the routers before.

    Args:
        spec: the resolved section; its path holds the router's modules.
        layer: the layer's plan.
    """

    def __init__(self, spec: RouterSpec, layer: LayerPlan) -> None:
        super().__init__(spec, layer)
        self.options = read_options(RecurrentOptions, spec.options, "a router with a memory")
        self.routed_experts = self.experts
        self.experts += self.options.skips

    def build(self, moe: nn.Module) -> None:
        """Place the projection, the MLP, the factor on the memory and the selection bias."""
        spec, width = self.spec, self.options.width
        place(moe, f"{spec.path}.down_proj", nn.Linear(self.dims, width))
        place(moe, f"{spec.path}.router_mlp", RouterMLP(width, self.experts, self.eps))
        if self.layer.index:
            place(moe, f"{spec.path}.router_states_scale", mx.ones((width,)))
        if self.bias_path:
            # The last pick, which does nothing, starts behind the others.
            start = mx.concatenate([mx.zeros((self.experts - 1,)), -mx.ones((1,))])
            place(moe, self.bias_path, start)

    def route(self, moe: nn.Module) -> Routing:
        """The call with the leaves that are in ``moe`` now."""
        spec, k, count, module = self.spec, self.top_k, self.routed_experts, find(moe, self.spec.path)
        above, _, leaf = (self.bias_path or "").rpartition(".")
        holder = find(moe, above) if self.bias_path else None

        def routed(x: mx.array, state: ForwardState) -> Routed:
            h = module.down_proj(x)
            if state.router_memory is not None and self.layer.index:
                h = h + state.router_memory * module.router_states_scale
            state.router_memory = h
            scores = SCORES[spec.score](module.router_mlp(h))
            chosen = scores.astype(mx.float32)
            if holder is not None:
                chosen = chosen + holder[leaf]
            indices = mx.stop_gradient(mx.argpartition(-chosen, kth=k - 1, axis=-1)[..., :k])
            weights = mx.take_along_axis(scores, indices, axis=-1)
            weights = normalise(weights, spec.renormalize).astype(mx.float32) * spec.scale
            skipped = indices >= count
            return Routed(mx.where(skipped, 0, indices), mx.where(skipped, 0.0, weights))

        return routed


@hookimpl
def register_routers() -> dict[str, Any]:
    """The router `recurrent`."""
    return {"recurrent": RecurrentRouter}
