"""A decoder layer of two attentions and two MLPs, with the experts on a shortcut across its second half."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mlp import MLP, activation_of
from mlx_experts.engine.layers.module_tree import find, make_norm, place
from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.engine.models.decoder import make_mixer, make_mlp, refuse_parallel
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.attention import PluginMixerSpec
from mlx_experts.registry.spec.family import DenseSpec
from mlx_experts.registry.spec.values import Options, Spec

_HALVES = 2


class ShortcutOptions(Spec):
    """Options of a layer with a shortcut."""

    dense: DenseSpec = Field(description="The MLP of each half; its path holds a list.")
    second: Options = Field({}, description="What the second half's mixer has otherwise.")


class ShortcutLayer(VersionedModule):
    """Two pre-norm halves; the experts read the first half's MLP input and are added at the end.

    LanguageModel in the LongCat-Flash report (2025), section 2.1, and in transformers'
    ``models/longcat_flash/modeling_longcat_flash.py``. Mixers, MLPs and norms stand in lists under the
    names that the family gives a single one.

    Args:
        layer: the layer's plan; the block's options are :class:`ShortcutOptions`.
        plan: the model's plan.
        fused: passed to the MoE block.

    Raises:
        SpecError: the layer lacks a mixer, experts, or one of the norms, or has parallel branches.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, fused: bool | None) -> None:
        super().__init__()
        refuse_parallel(layer, plan)
        block, sizes = layer.block, layer.sizes
        if layer.mixer is None or layer.moe is None or block.pre_mixer is None or block.pre_mlp is None:
            raise SpecError(
                "a layer with a shortcut needs a mixer, experts, and a norm before each",
                where=f"{plan.family.family}.yaml, layer {layer.index}",
            )
        options = read_options(ShortcutOptions, layer.block.options, "a layer with a shortcut")
        dense, other = options.dense, layer
        if options.second:
            if not isinstance(layer.mixer, PluginMixerSpec):
                raise SpecError(
                    "the second half of a layer with a shortcut has options, and its attention takes none",
                    where=f"{plan.family.family}.yaml, block.options.second",
                    expected="an attention `kind` with `options`",
                )
            changed = {**layer.mixer.options, **options.second}
            other = dataclasses.replace(layer, mixer=layer.mixer.model_copy(update={"options": changed}))
        width = dense.width if dense.width is not None else sizes.dense_width or 0
        self._paths = (layer.mixer.path, dense.path, block.pre_mixer, block.pre_mlp, layer.moe.path)
        place(self, layer.mixer.path, [make_mixer(each, plan, fused) for each in (layer, other)])
        place(
            self,
            dense.path,
            [
                MLP(sizes.hidden_size, width, activation_of(dense.activation), bias=dense.bias)
                for _ in range(_HALVES)
            ],
        )
        for name in (block.pre_mixer, block.pre_mlp):
            norms = [make_norm(plan.norm, sizes.hidden_size, sizes.norm_eps) for _ in range(_HALVES)]
            place(self, name, norms)
        place(self, layer.moe.path, make_mlp(layer, plan, fused))

    def bind(self) -> tuple[Any, ...]:
        """Mixers, MLPs, norms before the mixers and before the MLPs, and the experts."""
        return tuple(find(self, path) for path in self._paths)

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D]; ``cache`` holds one cache for each half."""
        mixers, mlps, pre_mixer, pre_mlp, experts = self.steps()
        shortcut: mx.array | float = 0.0
        for half in range(_HALVES):
            x = x + mixers[half](pre_mixer[half](x), state, cache[half] if cache is not None else None)
            normed = pre_mlp[half](x)
            if half == 0:
                shortcut = experts(normed)
            x = x + mlps[half](normed)
        return x + shortcut

    def make_cache(self) -> CacheList:
        """The caches of both halves."""
        return CacheList(*(mixer.make_cache() for mixer in find(self, self._paths[0])))


@hookimpl
def register_blocks() -> dict[str, Any]:
    """The decoder layer `shortcut`."""
    return {"shortcut": ShortcutLayer}
