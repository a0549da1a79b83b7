"""Attention to a window and to compressed groups of older tokens, with one head that is key and value.

The source is transformers' ``models/deepseek_v4/modeling_deepseek_v4.py``; sections are those of the
DeepSeek-V4 report. Legend: B batch, L tokens, D model width, h heads, d head width, G compressed groups,
r tokens of a group, K picked groups.
"""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, RotatingKVCache
from mlx_lm.models.mla import MultiLinear
from pydantic import Field

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.caches.pooled_cache import PooledCache
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.options import check_parts, mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.layers.rope_turns import turn
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Count, Spec, Width


class CompressedOptions(Spec):
    """Options of attention to compressed groups."""

    head_dim: Width = Field(description="Width of a head; its last values are rotated.")
    q_rank: Width = Field(description="Latent width of queries.")
    window: Width = Field(description="Tokens seen as they are, the token itself counted.")
    out_groups: Width = Field(description="Groups of heads that the output is first projected in.")
    out_rank: Width = Field(description="Width that each of them is projected to.")
    ratio: Count = Field(0, description="Tokens of a compressed group; 0 for none.")
    indexed: Bool = Field(False, description="Groups overlap, and an indexer picks among them.")
    index_heads: Width = Field(1, description="Heads of the indexer.")
    index_dim: Width = Field(1, description="Width of an index head.")
    index_topk: Width = Field(1, description="Groups that a query attends to.")


class Compressor(nn.Module):
    """Pools groups of tokens by a softmax of learned gates over each channel (sections 2.3.1 and 2.3.2).

    Args:
        width: D.
        dim: d.
        ratio: r.
        overlap: a group also pools a second series of the group before.
        eps: epsilon of the norm.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("position_bias",)

    def __init__(self, width: int, dim: int, ratio: int, overlap: bool, eps: float) -> None:
        super().__init__()
        rows = dim * (2 if overlap else 1)
        self.kv_proj = nn.Linear(width, rows, bias=False)
        self.gate_proj = nn.Linear(width, rows, bias=False)
        self.position_bias = mx.zeros((ratio, rows))
        self.kv_norm = nn.RMSNorm(dim, eps=eps)
        self._dim, self._ratio, self._overlap = dim, ratio, overlap

    def __call__(self, x: mx.array, rope: Rope | None, cache: PooledCache | None) -> mx.array | None:
        """``x`` [B, L, D] to all groups [B, G, d] so far, or None without any."""
        rows = mx.concatenate([self.kv_proj(x), self.gate_proj(x)], axis=-1)
        held = PooledCache(self._ratio) if cache is None else cache
        rows, first = held.close(rows)
        if rows.shape[1]:
            pooled = self._pool(mx.unflatten(rows, 1, (-1, self._ratio)), held)
            if rope is not None:
                pooled = turn(rope, pooled[:, None], first, tail=True, stride=self._ratio)[:, 0]
            held.append(pooled)
        return held.pooled

    def _pool(self, rows: mx.array, held: PooledCache) -> mx.array:
        """Groups [B, n, r, 2 * w] of values and gates to [B, n, d]."""
        kv, gate = mx.split(rows, 2, axis=-1)
        gate = gate.astype(mx.float32) + self.position_bias.astype(mx.float32)
        if self._overlap:
            d = self._dim
            before = mx.stack([kv[..., :d].astype(mx.float32), gate[..., :d]], axis=-1)
            start = held.last
            if start is None:
                nothing = mx.zeros_like(before[:, :1, ..., 0])
                start = mx.stack([nothing, nothing - mx.inf], axis=-1)
            held.last = mx.contiguous(before[:, -1:])
            before = mx.concatenate([start, before[:, :-1]], axis=1)
            kv = mx.concatenate([before[..., 0].astype(kv.dtype), kv[..., d:]], axis=2)
            gate = mx.concatenate([before[..., 1], gate[..., d:]], axis=2)
        weights = mx.softmax(gate, axis=2).astype(kv.dtype)
        return self.kv_norm((kv * weights).sum(axis=2))


class Scorer(nn.Module):
    """Weights of the index heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(width, heads, bias=False)


class GroupIndexer(Compressor):
    """A narrow compressor whose groups are scored, as DeepSeek-V3.2's indexer scores tokens.

    Args:
        spec: the mixer's options.
        width: D.
        eps: epsilon of the norm.
    """

    def __init__(self, spec: CompressedOptions, width: int, eps: float) -> None:
        super().__init__(width, spec.index_dim, spec.ratio, True, eps)
        self.q_b_proj = nn.Linear(spec.q_rank, spec.index_heads * spec.index_dim, bias=False)
        self.scorer = Scorer(width, spec.index_heads)
        self._heads = spec.index_heads

    def scores(
        self, x: mx.array, latent: mx.array, keys: mx.array, rope: Rope | None, offset: Any
    ) -> mx.array:
        """Scores [B, L, G] in float32 of groups ``keys`` [B, G, d] for each token."""
        q = mx.unflatten(self.q_b_proj(latent), -1, (self._heads, -1)).swapaxes(1, 2)
        q = q if rope is None else turn(rope, q, offset, tail=True)
        weights = self.scorer.weights_proj(x).astype(mx.float32) * (self._heads * self._dim) ** -0.5
        scores = mx.maximum(q.astype(mx.float32) @ keys[:, None].astype(mx.float32).swapaxes(-1, -2), 0.0)
        return (scores * weights.swapaxes(1, 2)[..., None]).sum(axis=1)


class CompressedAttention(Mixer):
    """Attention to a window, and to groups of all tokens before.

    Keys are the values too, rotated at their position; the output is rotated back at the query's.

    Args:
        layer: the layer's plan; the mixer's options are :class:`CompressedOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: the heads cannot be divided into the output's groups, or nothing is rotated.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("sinks", "position_bias")

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        self._spec = spec = mixer_options(CompressedOptions, layer, "attention to compressed groups")
        width, eps, heads = layer.sizes.hidden_size, layer.sizes.norm_eps, layer.sizes.num_heads
        problem = "the heads cannot be divided into the groups of the output projection"
        check_parts(heads, spec.out_groups, problem, layer.index)
        if layer.rope is None:
            raise ConfigError("attention to compressed groups needs a rotation", where="the family file")
        self.heads, self._eps, self.scale = heads, eps, spec.head_dim**-0.5
        self._rope = Rope(layer.rope, layer.rope.width(spec.head_dim), spec.head_dim)
        self.q_a_proj = nn.Linear(width, spec.q_rank, bias=False)
        self.q_a_norm = nn.RMSNorm(spec.q_rank, eps=eps)
        self.q_b_proj = nn.Linear(spec.q_rank, heads * spec.head_dim, bias=False)
        self.kv_proj = nn.Linear(width, spec.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(spec.head_dim, eps=eps)
        self.o_a_proj = MultiLinear(heads * spec.head_dim // spec.out_groups, spec.out_rank, spec.out_groups)
        self.o_b_proj = nn.Linear(spec.out_groups * spec.out_rank, width, bias=False)
        self.sinks = mx.zeros((heads,))
        if spec.ratio:
            self.compressor = Compressor(width, spec.head_dim, spec.ratio, spec.indexed, eps)
            if spec.indexed:
                self.compressor.indexer = GroupIndexer(spec, width, eps)

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        spec, (B, L, _) = self._spec, x.shape
        own = cache[0] if cache is not None and spec.ratio else cache
        offset = own.offset + 0 if own is not None else 0
        latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(latent).reshape(B, L, self.heads, spec.head_dim).swapaxes(1, 2)
        q = turn(self._rope, mx.fast.rms_norm(q, None, self._eps), offset, tail=True)
        kv = turn(self._rope, self.kv_norm(self.kv_proj(x))[:, None], offset, tail=True)
        mask = state.attention_mask(x, own, spec.window, as_array=bool(spec.ratio) and L > 1)
        if own is not None:
            # One column stands in for the values, which are the keys.
            kv, _ = own.update_and_fetch(kv, kv[..., :1])
        if spec.ratio:
            groups = self.compressor(x, self._rope, cache[1] if cache is not None else None)
            kv, mask = self._with_groups(x, latent, kv, groups, mask, offset, cache)
        out = mx.fast.scaled_dot_product_attention(
            q, kv, kv, scale=self.scale, mask=mask, sinks=self.sinks.astype(q.dtype)
        )
        out = turn(self._rope, out, offset, tail=True, backwards=True)
        out = out.reshape(B, spec.out_groups, -1, L, spec.head_dim).transpose(0, 1, 3, 2, 4).flatten(-2)
        return self.o_b_proj(self.o_a_proj(out).swapaxes(1, 2).flatten(-2))

    def _with_groups(
        self,
        x: mx.array,
        latent: mx.array,
        kv: mx.array,
        groups: mx.array | None,
        mask: Any,
        offset: int,
        cache: Any,
    ) -> tuple[mx.array, Any]:
        """Keys with the groups behind them, and the mask over both."""
        spec, L = self._spec, x.shape[1]
        keys = None
        if spec.indexed:
            keys = self.compressor.indexer(x, self._rope, cache[2] if cache is not None else None)
        if groups is None:
            return kv, mask
        whole = (offset + mx.arange(L) + 1) // spec.ratio
        seen = (mx.arange(groups.shape[1]) < whole[:, None])[None]
        if spec.indexed and keys is not None and groups.shape[1] > spec.index_topk:
            scores = self.compressor.indexer.scores(x, latent, keys, self._rope, offset)
            scores = mx.where(seen, scores, -mx.inf)
            picked = mx.stop_gradient(mx.argpartition(-scores, kth=spec.index_topk - 1, axis=-1))
            picked = picked[..., : spec.index_topk]
            if L == 1:
                # One token sees every group: all are whole.
                shape = (*picked.shape[::2], groups.shape[-1])
                groups = mx.take_along_axis(groups, mx.broadcast_to(picked.swapaxes(1, 2), shape), axis=1)
                seen = mx.ones((1, 1, spec.index_topk), mx.bool_)
            else:
                chosen = mx.zeros(scores.shape, mx.bool_)
                seen = seen & mx.put_along_axis(chosen, picked, mx.array(True), axis=-1)
        kv = mx.concatenate([kv, groups[:, None]], axis=2)
        if mask is None:
            return kv, None
        seen = seen[:, None]
        mask = mx.broadcast_to(mask, (*seen.shape[:2], L, mask.shape[-1]))
        return kv, mx.concatenate([mask, seen], axis=-1)

    def make_cache(self) -> Any:
        """A window of keys, with the groups of the compressor and of the indexer."""
        spec = self._spec
        window = RotatingKVCache(max_size=spec.window, keep=0)
        if not spec.ratio:
            return window
        return CacheList(window, *(PooledCache(spec.ratio) for _ in range(2 if spec.indexed else 1)))


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `compressed`."""
    return {"compressed": CompressedAttention}
