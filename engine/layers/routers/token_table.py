"""A router that looks up each token's experts in a table; its matrix only weighs them.

The source is transformers' ``models/deepseek_v4/modeling_deepseek_v4.py`` (HashRouter).
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
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.values import Count, ModulePath, Spec


class TokenTableOptions(Spec):
    """Options of a router with a table."""

    path: ModulePath = Field(description="Leaf of the table, [vocabulary, K], from the MoE module.")
    types: list[str] | None = Field(None, description="For each layer the kind of its router.")
    word: str = Field(description="Layers of this kind have a table.")
    first: Count = Field(0, description="Without kinds: so many first layers have one.")


class TokenTableRouter(StatefulRouter):
    """Scores of all experts weigh the ones that the table names."""

    def __init__(self, spec: RouterSpec, layer: LayerPlan) -> None:
        # The table has picked, so nothing is selected.
        super().__init__(spec.model_copy(update={"selection_bias": None}), layer)
        self.options = read_options(TokenTableOptions, spec.options, "a router with a table")

    def build(self, moe: nn.Module) -> None:
        """Place the matrix, and the table, which is not trained."""
        super().build(moe)
        path, sizes = self.options.path, self.layer.sizes
        place(moe, path, mx.zeros((sizes.vocab_size, sizes.top_k), dtype=mx.int64))
        above, _, leaf = path.rpartition(".")
        find(moe, above).freeze(recurse=False, keys=[leaf])

    def route(self, moe: nn.Module) -> Routing:
        """The call with the leaves that are in ``moe`` now."""
        spec, score = self.spec, SCORES[self.spec.score]
        logits_of = self.bind(moe).logits
        above, _, leaf = self.options.path.rpartition(".")
        holder = find(moe, above)

        def routed(x: mx.array, state: ForwardState) -> Routed:
            indices = holder[leaf][state.inputs]
            weights = mx.take_along_axis(score(logits_of(x)), indices, axis=-1)
            weights = normalise(weights, spec.renormalize).astype(mx.float32)
            return Routed(indices, weights if spec.scale == 1.0 else weights * spec.scale)

        return routed


def make_token_table(spec: RouterSpec, layer: LayerPlan) -> TokenTableRouter | None:
    """The router of a layer with a table, or None for the standard one.

    Raises:
        ConfigError: the kinds are too few.
    """
    options = read_options(TokenTableOptions, spec.options, "a router with a table")
    if options.types is None:
        return TokenTableRouter(spec, layer) if layer.index < options.first else None
    if layer.index >= len(options.types):
        raise ConfigError(
            "config.json does not say which router each layer has",
            where="config.json",
            expected=f"more than {layer.index} entries",
            found=f"{len(options.types)} entries",
        )
    return TokenTableRouter(spec, layer) if options.types[layer.index] == options.word else None


@hookimpl
def register_routers() -> dict[str, Any]:
    """The router `token_table`."""
    return {"token_table": make_token_table}
