"""Block-sparse attention: an indexer picks the blocks of keys that each group of query heads attends to.

Legend: B batch, L tokens, T cached tokens, N blocks of keys, S keys of a block, i index heads, d their width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.values import Spec, Width


class BlockSparseOptions(Spec):
    """Options of block-sparse attention."""

    attention: GqaSpec = Field(description="The attention that the picked blocks are seen by.")
    index_heads: Width = Field(
        description="Heads of the indexer; each picks for an equal share of the heads."
    )
    index_dim: Width = Field(description="Width of an index head.")
    block: Width = Field(description="Keys of a block.")
    keep: Width = Field(description="Blocks that a query attends to.")
    local: Width = Field(1, description="So many blocks, the query's own the last, are always kept.")


class BlockSparseAttention(Attention):
    """Attention to the best blocks, after transformers' ``models/minimax_m3_vl/modeling_minimax_m3_vl.py``.

    A block's score is the best score of its visible keys. Blocks are counted from a sequence's first real
    token, so that padding on the left moves none of their borders.

    Args:
        layer: the layer's plan; the mixer's options are :class:`BlockSparseOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: the index heads do not divide the heads, or are narrower than what is rotated.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        spec = mixer_options(BlockSparseOptions, layer, "block-sparse attention")
        seen = spec.attention.model_copy(update={"rope": layer.rope})
        super().__init__(dataclasses.replace(layer, mixer=seen), plan)
        self._sparse, self._index_heads = spec, spec.index_heads
        sizes = layer.sizes
        check_parts(self.heads, spec.index_heads, "the index heads do not divide the query heads")
        turned = layer.rope.width(self.head_dim) if layer.rope is not None else 0
        if turned > spec.index_dim:
            raise ConfigError(
                "more of a head is rotated than an index head is wide",
                where="config.json or the family file",
                expected=f"at most {spec.index_dim} rotated values",
                found=str(turned),
            )
        self.index_q_proj = nn.Linear(sizes.hidden_size, spec.index_heads * spec.index_dim, bias=False)
        self.index_k_proj = nn.Linear(sizes.hidden_size, spec.index_dim, bias=False)
        norm = ZeroCentredRMSNorm if plan.norm.offset == "run" else nn.RMSNorm
        self.index_q_norm = norm(spec.index_dim, eps=sizes.norm_eps)
        self.index_k_norm = norm(spec.index_dim, eps=sizes.norm_eps)

    def __call__(
        self, x: mx.array, state: ForwardState, cache: Any = None, mask: mx.array | None = None
    ) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``, a list of two."""
        own, index = (None, None) if cache is None else (cache[0], cache[1])
        offset = 0 if own is None else own.offset + 0
        keys = self._index(x, 1, self.index_k_proj, self.index_k_norm, offset)
        if index is not None:
            # Only keys are needed; one column stands in for the values that the cache expects.
            keys, _ = index.update_and_fetch(keys, keys[..., :1])
        if -(-keys.shape[2] // self._sparse.block) > self._sparse.keep:
            seen = state.attention_mask(x, own, as_array=True)
            padding = own.left_padding if isinstance(own, BatchKVCache) else None
            mask = self._picked(x, keys, seen, offset, padding)
        y = super().__call__(x, state, own, mask)
        if own is not None and index is not None:
            # Where all blocks are kept the keys are in no result, and their graph would grow with each token.
            own.keys = mx.depends(own.keys, [index.keys, index.values])
        return y

    def _index(self, x: mx.array, heads: int, project: Any, norm: Any, offset: Any) -> mx.array:
        """Index queries or keys [B, heads, L, d]."""
        B, L, _ = x.shape
        t = norm(project(x).reshape(B, L, heads, self._sparse.index_dim)).swapaxes(1, 2)
        return t if self._rope is None else self._rope(t, offset)

    def _picked(
        self, x: mx.array, keys: mx.array, seen: mx.array | None, offset: Any, padding: mx.array | None
    ) -> mx.array:
        """Which keys each query head attends to, [B, h, L, T].

        Args:
            x: layer input [B, L, D].
            keys: index keys [B, 1, T, d].
            seen: the causal mask, or None where a single token sees all.
            offset: position of the first query, for each row of a batch.
            padding: columns [B] before the first real token of each row, or None.
        """
        spec, L, T = self._sparse, x.shape[1], keys.shape[2]
        q = self._index(x, self._index_heads, self.index_q_proj, self.index_q_norm, offset)
        scores = q.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        if seen is not None:
            scores = mx.where(seen, scores, -mx.inf)
        places = mx.arange(T)
        if padding is not None:
            shifted = (places + padding[:, None, None, None]) % T
            scores = mx.take_along_axis(scores, mx.broadcast_to(shifted, scores.shape), axis=-1)
        count = -(-T // spec.block)
        scores = mx.pad(scores, [(0, 0)] * 3 + [(0, count * spec.block - T)], constant_values=-mx.inf)
        best = mx.unflatten(scores, -1, (count, spec.block)).max(axis=-1)
        if spec.local > 0:
            first = offset[:, None, None] if isinstance(offset, mx.array) and offset.ndim else offset
            own = ((first + mx.arange(L)[:, None]) // spec.block)[..., None, :, :]
            near = (mx.arange(count) <= own) & (mx.arange(count) > own - spec.local)
            best = mx.where(near, mx.inf, best)
        picks = mx.stop_gradient(mx.argpartition(-best, kth=spec.keep - 1, axis=-1)[..., : spec.keep])
        kept = mx.put_along_axis(mx.zeros(best.shape, mx.bool_), picks, mx.array(True), axis=-1)
        kept = mx.repeat(kept, spec.block, axis=-1)[..., :T]
        if padding is not None:
            shifted = (places - padding[:, None, None, None]) % T
            kept = mx.take_along_axis(kept, mx.broadcast_to(shifted, kept.shape), axis=-1)
        if seen is not None:
            kept = kept & seen
        return mx.repeat(kept, self.heads // self._index_heads, axis=1)

    def cuts(self) -> Cuts:
        """Each rank keeps some of the heads and the index heads that pick for them."""
        cuts = super().cuts()
        counts, rows = {**cuts.counts, "_index_heads": "index heads"}, {**cuts.rows, "index_q_proj": 1}
        return dataclasses.replace(cuts, counts=counts, rows=rows)

    def make_cache(self) -> Any:
        """A cache of keys and values, and one of index keys."""
        return CacheList(KVCache(), KVCache())


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `block_sparse`."""
    return {"block_sparse": BlockSparseAttention}
