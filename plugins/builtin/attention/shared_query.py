"""Attention whose query heads are made from one narrow query that all of them share."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import make_norm
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.values import Spec, Width


class SharedQueryOptions(Spec):
    """Options of attention with a shared query."""

    attention: GqaSpec = Field(description="The attention.")
    width: Width = Field(description="Width of the shared query.")


class SharedQueryAttention(Attention):
    """Multi-matrix factorisation attention (Step-3, arXiv 2507.19427): ``q = wq(norm(q_proj(x)))``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`SharedQueryOptions`.
        plan: the model's plan.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        spec = mixer_options(SharedQueryOptions, layer, "attention with a shared query")
        attention = spec.attention.model_copy(update={"rope": layer.rope})
        super().__init__(dataclasses.replace(layer, mixer=attention), plan)
        sizes = layer.sizes
        self.q_proj = nn.Linear(sizes.hidden_size, spec.width, bias=False)
        self.inter_norm = make_norm(plan.norm, spec.width, sizes.norm_eps)
        self.wq = nn.Linear(spec.width, self.heads * self.head_dim, bias=False)

    def bind_project(self) -> Any:
        """As for any attention, with queries made of the shared one."""
        project, norm, widen = super().bind_project(), self.inter_norm, self.wq

        def projected(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
            q, k, v, gate = project(x, state)
            return widen(norm(q)), k, v, gate

        return projected

    def cuts(self) -> Cuts:
        """Each rank keeps some of the query heads; the shared query stays whole."""
        cuts = super().cuts()
        rows = {path: rows for path, rows in cuts.rows.items() if path != "q_proj"}
        return dataclasses.replace(cuts, rows={**rows, "wq": 1})


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `shared_query`."""
    return {"shared_query": SharedQueryAttention}
