"""A decoder layer with a dense MLP behind its mixer, and experts that read what the mixer reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mlp import MLP, activation_of
from mlx_experts.engine.layers.module_tree import find, make_norm, place
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import DenseSpec
from mlx_experts.registry.spec.values import Bool, ModulePath, Spec


class DenseResidualOptions(Spec):
    """Options of a layer with a dense residual."""

    dense: DenseSpec = Field(
        description="The dense MLP; it is as wide as the model where it states no width."
    )
    norm: ModulePath = Field(description="Norm before it.")
    enabled: Bool = Field(True, description="Whether layers with experts are of this form.")


class DenseResidualLayer(DecoderLayer):
    """``h = x + mixer(pre(x)); h + dense(norm(h)) + experts(pre(x))`` (Snowflake Arctic, modeling_arctic.py).

    Args:
        layer: the layer's plan; the block's options are :class:`DenseResidualOptions`.
        plan: the model's plan.
        fused: passed to the MoE block.

    Raises:
        SpecError: the layer lacks a mixer, or one of the norms.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__(layer, plan, fused)
        options = read_options(DenseResidualOptions, layer.block.options, "a layer with a dense residual")
        self._options = options if options.enabled and layer.moe is not None else None
        if self._options is None:
            return
        dense, width = options.dense, layer.sizes.hidden_size
        self.demand(layer, plan, "mixer", "mlp", "pre_mixer", "pre_mlp")
        mlp = MLP(
            width,
            dense.width or width,
            activation_of(dense.activation, dense.kind == "glu"),
            bias=dense.bias,
            names=dense.names,
        )
        place(self, dense.path, mlp)
        place(self, options.norm, make_norm(plan.norm, width, layer.sizes.norm_eps))

    def bind(self) -> Callable[[mx.array, ForwardState, Any], mx.array]:
        """The call as one function; a layer without experts is the standard one."""
        if self._options is None:
            return super().bind()
        parts = self.parts()
        mixer, feed, pre_mixer, pre_mlp = parts.mixer, parts.feed, parts.pre_mixer, parts.pre_mlp
        dense, norm = find(self, self._options.dense.path), find(self, self._options.norm)
        assert mixer is not None
        assert feed is not None

        def run(x: mx.array, state: ForwardState, cache: Any) -> mx.array:
            h = x + mixer(pre_mixer(x), state, cache)
            return h + dense(norm(h)) + feed(pre_mlp(x))

        return run


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `dense_residual`."""
    return {"dense_residual": DenseResidualLayer}
