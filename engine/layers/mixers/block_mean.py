"""Attention to the best blocks of tokens, scored by the mean of each block's index keys.

The source is transformers' ``models/qwen4_exp/modeling_qwen4_exp.py`` (QSAIndexer). Legend: B batch, L
tokens, T cached tokens, D model width, i index heads, d their width, G whole blocks, S tokens of a block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.caches.token_pools import chosen, pick_pools, pools
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.layers.rope_turns import turn
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.values import Spec, Width


class BlockMeanOptions(Spec):
    """Options of attention to blocks by their mean index key."""

    attention: GqaSpec = Field(description="The attention that the picked blocks are seen by.")
    index_heads: Width = Field(description="Heads of the indexer.")
    index_dim: Width = Field(description="Width of an index head.")
    block: Width = Field(description="Tokens of a block.")
    budget: Width = Field(description="Tokens of all picked blocks; those behind the last block come on top.")


class BlockMeanIndexer(nn.Module):
    """Queries of several heads, and one index key a token.

    Args:
        spec: the mixer's options.
        width: D.
        norm: the class of both norms.
        eps: their epsilon.
    """

    def __init__(self, spec: BlockMeanOptions, width: int, norm: Any, eps: float) -> None:
        super().__init__()
        self._spec = spec
        self.index_qk_proj = nn.Linear(width, (spec.index_heads + 1) * spec.index_dim, bias=False)
        self.q_layernorm = norm(spec.index_dim, eps=eps)
        self.k_layernorm = norm(spec.index_dim, eps=eps)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Normed queries [B, i, L, d], and keys [B, 1, L, d] as they are, of ``x`` [B, L, D]."""
        both = mx.unflatten(self.index_qk_proj(x), -1, (-1, self._spec.index_dim)).swapaxes(1, 2)
        q, k = mx.split(both, [self._spec.index_heads], axis=1)
        return self.q_layernorm(q), k

    def scores(self, q: mx.array, keys: mx.array, rope: Rope | None, padding: mx.array | None) -> mx.array:
        """Scores [B, 1, L, G] in float32 of whole blocks of ``keys`` [B, 1, T, d] for rotated queries."""
        spec = self._spec
        blocks = pools(keys.astype(mx.float32), spec.block, padding).mean(axis=-2).astype(keys.dtype)
        if not blocks.shape[2]:
            return mx.zeros((q.shape[0], 1, q.shape[2], 0))
        blocks = self.k_layernorm(blocks)
        if rope is not None:
            # A block stands where its first token does.
            blocks = turn(rope, blocks, 0, stride=spec.block)
        found = mx.maximum(q.astype(mx.float32) @ blocks.astype(mx.float32).swapaxes(-1, -2), 0.0)
        return found.sum(axis=1, keepdims=True) * spec.index_dim**-0.5


class BlockMeanAttention(Attention):
    """Attention to the picked blocks and to the tokens behind the last whole one.

    Args:
        layer: the layer's plan; the mixer's options are :class:`BlockMeanOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: the budget is no whole number of blocks.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        spec = mixer_options(BlockMeanOptions, layer, "attention to blocks by their mean")
        seen = spec.attention.model_copy(update={"rope": layer.rope})
        super().__init__(dataclasses.replace(layer, mixer=seen), plan)
        self._blocks = spec
        check_parts(spec.budget, spec.block, "the token budget is no whole number of blocks", layer.index)
        norm = ZeroCentredRMSNorm if plan.norm.offset == "run" else nn.RMSNorm
        self.indexer = BlockMeanIndexer(spec, layer.sizes.hidden_size, norm, layer.sizes.norm_eps)
        rope = layer.rope
        turned = rope.width(self.head_dim) if rope is not None else 0
        self._index_rope = Rope(rope, turned, spec.index_dim) if rope is not None else None

    def __call__(
        self, x: mx.array, state: ForwardState, cache: Any = None, mask: mx.array | None = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``, a list of two."""
        spec = self._blocks
        own, index = (None, None) if cache is None else (cache[0], cache[1])
        offset = 0 if own is None else own.offset + 0
        q, keys = self.indexer.project(x)
        if index is not None:
            # Only keys are needed; one column stands in for the values that the cache expects.
            keys, _ = index.update_and_fetch(keys, keys[..., :1])
        total = keys.shape[2]
        if total // spec.block > spec.budget // spec.block:
            padding = own.left_padding if isinstance(own, BatchKVCache) else None
            q = q if self._index_rope is None else self._index_rope(q, offset)
            scores = self.indexer.scores(q, keys, self._index_rope, padding)
            keep = spec.budget // spec.block
            mask = chosen(*pick_pools(scores, total, spec.block, keep, padding, rest=True), total)
            seen = state.attention_mask(x, own, as_array=True)
            mask = mask if seen is None else mask & seen
        y = super().__call__(x, state, own, mask)
        if own is not None and index is not None:
            # Where all blocks are kept the keys are in no result, and their graph would grow with each token.
            own.keys = mx.depends(own.keys, [index.keys, index.values])
        return y

    def make_cache(self) -> Any:
        """A cache of keys and values, and one of index keys."""
        return CacheList(KVCache(), KVCache())


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `block_mean`."""
    return {"block_mean": BlockMeanAttention}
