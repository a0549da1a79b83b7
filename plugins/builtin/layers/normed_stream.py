"""A decoder layer whose residual around the mixer is the normed input, and whose branches have factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.decode.layer_parts import as_it_is
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, make_norm, place
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import ModulePath, Num, Spec


class FirstFactors(Spec):
    """Factors of the first layer's branches."""

    mixer: Num = Field(1.0, description="Factor on the mixer's branch.")
    mlp: Num = Field(1.0, description="Factor on the MLP's branch.")


class NormedStreamOptions(Spec):
    """Options of a layer with a normed stream."""

    first: FirstFactors = Field(description="Factors in the first layer.")
    first_norm: ModulePath = Field(description="Norm on the MLP's branch of the first layer.")
    mixer: Num = Field(1.0, description="Factor on the mixer's branch in later layers.")
    mlp: Num = Field(1.0, description="Factor on the MLP's branch in later layers.")


class NormedStreamLayer(DecoderLayer):
    """``n = pre(x); h = n + a post(mixer(n)); h + b mlp(pre(h))`` (SGLang's ``srt/models/iquest_q1.py``).

    The first layer keeps its input as the residual, and has a norm on its MLP's branch.

    Args:
        layer: the layer's plan; the block's options are :class:`NormedStreamOptions`.
        plan: the model's plan.
        fused: passed to the MoE block.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__(layer, plan, fused)
        self.demand(layer, plan, "mixer", "mlp", "pre_mixer", "pre_mlp")
        options = read_options(NormedStreamOptions, layer.block.options, "a layer with a normed stream")
        self._first = layer.index == 0
        first = options.first
        self._factors = (first.mixer, first.mlp) if self._first else (options.mixer, options.mlp)
        self._last_norm = options.first_norm if self._first else None
        if self._last_norm is not None:
            place(self, self._last_norm, make_norm(plan.norm, layer.sizes.hidden_size, layer.sizes.norm_eps))

    def bind(self) -> Callable[[mx.array, ForwardState, Any], mx.array]:
        """The call as one function."""
        parts, first, (a, b) = self.parts(), self._first, self._factors
        mixer, feed, pre_mixer, pre_mlp = parts.mixer, parts.feed, parts.pre_mixer, parts.pre_mlp
        post = parts.post_mixer or as_it_is
        last = as_it_is if self._last_norm is None else find(self, self._last_norm)
        assert mixer is not None
        assert feed is not None

        def run(x: mx.array, state: ForwardState, cache: Any) -> mx.array:
            normed = pre_mixer(x)
            h = (x if first else normed) + a * post(mixer(normed, state, cache))
            return h + b * last(feed(pre_mlp(h)))

        return run


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `normed_stream`."""
    return {"normed_stream": NormedStreamLayer}
