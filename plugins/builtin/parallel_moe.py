"""Decoder layers whose experts run beside a dense MLP, with inputs of their own and an output scale.

The module tree of such a layer has the router and the experts at its top, beside `mlp` and `self_attn`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.kernels.activations import apply
from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mlp import MLP, activation_of
from mlx_experts.engine.layers.module_tree import find, make_norm, place
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.engine.models.decoder import layer_path, make_mixer, refuse_parallel
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, ModulePath, Spec


class ParallelMoeOptions(Spec):
    """Options of a layer with experts beside a dense MLP."""

    double_wide: Bool = Field(
        False, description="The MLP has twice its width where a layer reuses keys and values."
    )
    dense_norm: ModulePath = Field(description="Norm after the MLP, in layers with experts.")
    expert_pre_norm: ModulePath = Field(description="Norm before the experts.")
    expert_norm: ModulePath = Field(description="Norm after the experts.")


class Frame(VersionedModule):
    """What layers with and without experts share; `feed` tells them apart.

    LanguageModel in transformers' ``models/gemma4/modeling_gemma4.py`` (Gemma4TextDecoderLayer).
    """

    def frame(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> ParallelMoeOptions:
        """Build everything but the experts.

        Raises:
            SpecError: the layer lacks attention or an MLP, or asks for branches of the standard layer.
        """
        refuse_parallel(layer, plan)
        options = read_options(ParallelMoeOptions, layer.block.options, "a layer with parallel experts")
        width, block = layer.sizes.hidden_size, layer.block
        dense = layer.moe.shared if layer.moe is not None else layer.dense
        if layer.mixer is None or dense is None:
            raise SpecError(
                "a layer with parallel experts has attention and a dense MLP",
                where=f"{plan.family.family}.yaml, layer {layer.index}",
                expected="`attention`, and `moe.shared` or `dense`",
                hint="state what is missing, or another `block.kind`",
            )
        self._block, self._index, self._mixer_path = block, layer.index, layer.mixer.path
        mixer = make_mixer(layer, plan, fused)
        place(self, self._mixer_path, mixer)
        inner = dense.width if dense.width is not None else layer.sizes.dense_width or 0
        if options.double_wide and isinstance(mixer, Attention) and mixer.reuses_kv:
            inner *= 2
        self.mlp = MLP(width, inner, activation_of(dense.activation), bias=dense.bias, names=dense.names)
        for name in (block.pre_mixer, block.post_mixer, block.pre_mlp, block.post_mlp):
            self._norm(name, layer, plan)
        self.layer_scalar = mx.ones((1,))
        own = plan.embedding.layer_inputs.width if plan.embedding.layer_inputs is not None else 0
        self._own_input = own > 0
        if self._own_input:
            self._activation = activation_of(dense.activation, glu=False)
            self.per_layer_input_gate = nn.Linear(width, own, bias=False)
            self.per_layer_projection = nn.Linear(own, width, bias=False)
            self.post_per_layer_input_norm = make_norm(plan.norm, width, layer.sizes.norm_eps)
        return options

    def _norm(self, name: str | None, layer: LayerPlan, plan: Plan) -> None:
        if name is not None:
            place(self, name, make_norm(plan.norm, layer.sizes.hidden_size, layer.sizes.norm_eps))

    def _normed(self, name: str | None, x: mx.array) -> mx.array:
        return x if name is None else find(self, name)(x)

    def feed(self, x: mx.array) -> mx.array:
        """The MLP branch [B, L, D], before its last norm."""
        return self.mlp(self._normed(self._block.pre_mlp, x))

    def step(self, x: mx.array, state: ForwardState, cache: Any) -> mx.array:
        """``x`` [B, L, D] to [B, L, D]."""
        block = self._block
        mixed = find(self, self._mixer_path)(self._normed(block.pre_mixer, x), state, cache)
        x = x + self._normed(block.post_mixer, mixed)
        x = x + self._normed(block.post_mlp, self.feed(x))
        if self._own_input:
            gate = apply(self._activation, None, self.per_layer_input_gate(x))
            assert state.layer_inputs is not None
            own = self.per_layer_projection(gate * state.layer_inputs[:, :, self._index])
            x = x + self.post_per_layer_input_norm(own)
        return x * self.layer_scalar

    def make_cache(self) -> Any:
        """The mixer's cache, or None where it reads another layer's."""
        return find(self, self._mixer_path).make_cache()


class DenseLayer(Frame):
    """A layer without experts."""

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__()
        self.frame(layer, plan, fused)

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        return self.step(x, state, cache)


class ExpertLayer(MoE, Frame):
    """A layer with experts, which is itself the MoE block because their leaves stand at its top.

    Args:
        layer: the layer's plan; the block's options are :class:`ParallelMoeOptions`.
        plan: the model's plan.
        fused: True or False to force or forbid the fused path; None for the policy.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        assert layer.moe is not None
        super().__init__(layer, f"{layer_path(layer, plan)}.{layer.moe.experts.path}", fused)
        self._options = self.frame(layer, plan, fused)
        for name in (self._options.dense_norm, self._options.expert_pre_norm, self._options.expert_norm):
            self._norm(name, layer, plan)

    def feed(self, x: mx.array) -> mx.array:
        """Both branches [B, L, D]; the router reads what no norm has touched."""
        options, wide = self._options, x.astype(mx.float32)
        # In float32 up to the sum, which is rounded once: the branches may nearly cancel.
        dense = self._normed(options.dense_norm, super().feed(wide))
        routed = self.total(self._normed(options.expert_pre_norm, wide), x)
        return (dense + self._normed(options.expert_norm, routed)).astype(x.dtype)

    def __call__(  # type: ignore[override]
        self, x: mx.array, state: ForwardState, cache: Any = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        return self.step(x, state, cache)


def make_layer(layer: LayerPlan, plan: Plan, fused: bool | None) -> Frame:
    """The layer that a plan describes."""
    return ExpertLayer(layer, plan, fused) if layer.moe is not None else DenseLayer(layer, plan, fused)


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `parallel_moe`."""
    return {"parallel_moe": make_layer}
