"""Attention that sees the whole prompt, and of what was generated the last tokens.

Legend: B batch, L tokens, D model width, T cached tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.values import Spec, Width


class KeptPromptOptions(Spec):
    """Options of attention that keeps the prompt."""

    attention: GqaSpec = Field(description="The attention.")
    window: Width = Field(description="Generated tokens that are visible, the token itself counted.")


class KeptPromptAttention(Attention):
    """Reference sliding-window attention, after transformers' ``models/unlimited_ocr``.

    What comes several tokens at a time is prompt, what comes alone is generated.

    Args:
        layer: the layer's plan; the mixer's options are :class:`KeptPromptOptions`.
        plan: the model's plan.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        spec = mixer_options(KeptPromptOptions, layer, "attention that keeps the prompt")
        attention = spec.attention.model_copy(update={"rope": layer.rope})
        super().__init__(dataclasses.replace(layer, mixer=attention), plan)
        self._generated = spec.window

    def __call__(
        self, x: mx.array, state: ForwardState, cache: Any = None, mask: mx.array | None = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``, a list of two."""
        if cache is None:
            return super().__call__(x, state, None, mask)
        own, counts = cache[0], cache[1]
        B, L, _ = x.shape
        seen = own._idx if isinstance(own, BatchKVCache) else own.offset
        count = mx.zeros((B,), dtype=mx.int32)
        if L == 1 and seen:
            count = counts[0] + 1
            columns = mx.arange(seen + 1)
            # Rows of a padded batch end together, so that a prompt ends where fewer tokens than it were made.
            mask = (columns < seen + 1 - count[:, None]) | (columns > seen - self._generated)
            mask = mask[:, None, None]
            real = state.attention_mask(x, own, as_array=True)
            mask = mask if real is None else mask & real
        counts[0] = count
        return super().__call__(x, state, own, mask)

    def make_cache(self) -> CacheList:
        """Keys and values, and how many tokens of each row were generated."""
        return CacheList(KVCache(), ArraysCache(size=1))


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `kept_prompt`."""
    return {"kept_prompt": KeptPromptAttention}
