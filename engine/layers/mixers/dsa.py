"""DeepSeek sparse attention (DeepSeek-V3.2, section 2.1): an indexer picks the tokens that MLA attends to.

Legend: B batch, L tokens, T cached tokens, K picked tokens, D model width, i index heads, d their width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache
from pydantic import Field

from mlx_experts.engine.layers.caches.token_pools import best_of, chosen, pick_pools, pools
from mlx_experts.engine.layers.forward_context import ForwardState, KeptLatents
from mlx_experts.engine.layers.mixers.mla import LatentAttention, MlaOptions, PositionScale, remember
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.layers.rope_turns import turn
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.attention import Pairs
from mlx_experts.registry.spec.rope_plan import RopePlan
from mlx_experts.registry.spec.values import Bool, Count, ModulePath, Positive, Width

_SHARED = {"full": False, "F": False, "shared": True, "S": True}


class DsaOptions(MlaOptions):
    """Options of sparse latent attention."""

    indexer: Bool = Field(True, description="Whether tokens are picked at all.")
    index_heads: Width = Field(description="Heads of the indexer.")
    index_dim: Width = Field(description="Width of an index head, of which `rope_dim` values are rotated.")
    index_topk: Width = Field(description="Tokens that a query attends to.")
    index_style: Pairs = Field(description="Which pairs of an index head rotate.")
    index_tail: bool = Field(False, description="The last values of an index head rotate, not the first.")
    index_eps: Positive = Field(1e-6, description="Epsilon of the norm of index keys.")
    index_norm: Literal["layer", "rms"] = Field("layer", description="The norm of index keys.")
    index_sinks: Count = Field(0, description="First tokens that are always picked.")
    index_recent: Count = Field(0, description="Last tokens that are always picked, the query's own counted.")
    index_follows: bool = Field(False, description="The mixer uses what the one before it has picked.")
    index_input: Literal["latent", "normed"] = Field(
        "latent", description="Index queries are made of the query latent, or of the layer-normed input."
    )
    index_position_scale: ModulePath | None = Field(
        None, description="Module, in the indexer, of a learned query scale for each index head."
    )
    index_pool: Count = Field(0, description="Keys of a pool that is picked as one; 0 for single tokens.")
    index_keep_rest: Bool = Field(True, description="Tokens behind the last whole pool are always seen.")
    index_types: list[str] | str | None = Field(
        None,
        description="For each layer `full` or `shared` (or a letter of them): whether it has an indexer.",
    )
    index_every: Width = Field(1, description="Without types: every n-th layer has an indexer,")
    index_first: Count = Field(2, description="counted from the layer before this one; so has every earlier.")


class Indexer(nn.Module):
    """Scores every cached token for every query, after transformers' ``DeepseekV32Indexer``.

    Args:
        spec: the mixer's options.
        width: D.
        rope: rotary parameters of the layer, or None where it rotates nothing.
    """

    def __init__(self, spec: DsaOptions, width: int, rope: RopePlan | None) -> None:
        super().__init__()
        self.heads, self.dim, self._spec = spec.index_heads, spec.index_dim, spec
        normed = spec.index_input == "normed"
        self.wq_b = nn.Linear(width if normed else spec.q_rank or width, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(width, self.dim, bias=False)
        norm = nn.RMSNorm if spec.index_norm == "rms" else nn.LayerNorm
        self.k_norm = norm(self.dim, eps=spec.index_eps)
        self.weights_proj = nn.Linear(width, self.heads, bias=False)
        if normed:
            self.q_input_norm = nn.LayerNorm(width, eps=1e-6)
        if spec.index_position_scale is not None:
            place(self, spec.index_position_scale, PositionScale(self.heads))
        if spec.index_pool:
            self.index_kpool_compress_gate = mx.zeros((self.dim, width))
            self.index_kpool_compress_ape = mx.zeros((spec.index_pool, self.dim))
        turned = dataclasses.replace(rope, style=spec.index_style) if rope is not None else None
        self._rope = Rope(turned, spec.rope_dim, spec.index_dim) if turned is not None else None

    def _turned(self, t: mx.array, state: ForwardState, offset: Any) -> mx.array:
        if self._rope is None:
            return t
        scale = state.log_frequencies if self._spec.learned_frequencies else None
        return turn(self._rope, t, offset, tail=self._spec.index_tail, log_scale=scale)

    def keys(self, x: mx.array, state: ForwardState, offset: Any) -> tuple[mx.array, mx.array]:
        """Index keys [B, 1, L, d] of ``x`` [B, L, D], and what weighs them in a pool (or one column)."""
        k = self._turned(self.k_norm(self.wk(x))[:, None], state, offset)
        if not self._spec.index_pool:
            # Only keys are needed; one column stands in for the values that a cache expects.
            return k, k[..., :1]
        return k, (x @ self.index_kpool_compress_gate.T)[:, None]

    def pooled(self, keys: mx.array, gates: mx.array, padding: mx.array | None) -> mx.array:
        """Keys [B, 1, G, d] of whole pools of tokens, weighted by a softmax of each channel's gates.

        Args:
            keys, gates: [B, 1, T, d].
            padding: columns [B] before the first real token of each row, or None.
        """
        keys, gates = (pools(t, self._spec.index_pool, padding) for t in (keys, gates))
        gates = gates.astype(mx.float32) + self.index_kpool_compress_ape.astype(mx.float32)
        return (mx.softmax(gates, axis=-2).astype(keys.dtype) * keys).sum(axis=-2)

    def scores(
        self, x: mx.array, latent: mx.array, keys: mx.array, state: ForwardState, offset: Any
    ) -> mx.array:
        """Scores [B, 1, L, T] in float32: each head's ReLU score, weighted by the query's token.

        Args:
            x: layer input [B, L, D].
            latent: query latent [B, L, q_rank].
            keys: index keys [B, 1, T, d].
        """
        B, L, _ = x.shape
        q = self.wq_b(self.q_input_norm(x) if self._spec.index_input == "normed" else latent)
        q = q.reshape(B, L, self.heads, self.dim).swapaxes(1, 2)
        if self._spec.index_position_scale is not None:
            q = find(self, self._spec.index_position_scale)(q, offset)
        q = self._turned(q, state, offset).astype(mx.float32)
        turned = keys.astype(mx.float32).swapaxes(-1, -2)
        weights = self.weights_proj(x).astype(mx.float32) * (self.heads * self.dim) ** -0.5
        if L == 1:
            return weights[:, None] @ mx.maximum(q @ turned, 0.0).swapaxes(1, 2)
        # Head by head: all heads at once would hold i * L * T numbers.
        total = mx.zeros((B, 1, L, turned.shape[-1]))
        for head in range(self.heads):
            score = mx.maximum(q[:, head : head + 1] @ turned, 0.0)
            total = total + score * weights[:, None, :, head : head + 1]
        return total


class SparseAttention(LatentAttention):
    """Latent attention to the tokens that an indexer picks.

    A layer without an indexer attends to what the nearest earlier one picked (GLM-5, after transformers'
    ``models/glm_moe_dsa/modular_glm_moe_dsa.py``), and one without latents to those of an earlier layer
    (``models/mistral_large4``). While there are no more tokens than can be picked, attention is dense.

    Args:
        layer: the layer's plan; the mixer's options are :class:`DsaOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: queries have no latent, or the first layer has no indexer to attend by.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__(layer, plan)
        self._dsa = spec = mixer_options(DsaOptions, layer, "sparse attention")
        if not spec.q_rank and spec.index_input == "latent" and spec.indexer:
            raise ConfigError(
                "an indexer needs a latent width of queries", where="config.json or the family file"
            )
        if spec.indexer and spec.window:
            raise ConfigError("an indexer picks among all tokens, not in a window", where="the family file")
        follows = spec.index_follows
        self._shared = spec.indexer and (follows or shares_selection(spec, layer.index))
        if self._shared and layer.index == 0 and not follows:
            raise ConfigError(
                "the first layer shares an indexer, and there is none before it",
                where="config.json or the family file",
            )
        earlier = range(layer.index - 1, -1, -1) if self._shared and not follows else ()
        self._source = next((i for i in earlier if not shares_selection(spec, i)), None)
        self._indexed = spec.indexer and not self._shared
        if self._indexed:
            self.indexer = Indexer(
                spec, layer.sizes.hidden_size, layer.rope if self._rope is not None else None
            )

    @classmethod
    def options_kind(cls) -> type[DsaOptions]:
        """The model that the mixer's options are read into."""
        return DsaOptions

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        own, index = self._caches(cache)
        L = x.shape[1]
        if self._borrows:
            if (self.rope_dim > 0) not in state.latents:
                raise ConfigError(
                    "a layer takes its keys from an earlier one that turns as it does, and there is none",
                    where="config.json, the layers without rotation",
                )
            kept = state.latents[self.rope_dim > 0]
            latent, k_rope, offset, padding, mask = (
                kept.latent,
                kept.key,
                kept.offset,
                kept.padding,
                kept.mask,
            )
            sparse = self._dsa.indexer and self._is_sparse(kept.seen + L)
        else:
            padding = own.left_padding if isinstance(own, BatchKVCache) else None
            offset, seen = (own.offset + 0, own.size()) if own is not None else (0, 0)
            sparse = self._dsa.indexer and self._is_sparse(seen + L)
            mask = state.attention_mask(x, own, self._spec.window or None, as_array=sparse)
            latent, k_rope = self.latents(x, state, offset)
            if own is not None:
                latent, k_rope = remember(own, latent, k_rope)
            if self._lends:
                kept = KeptLatents(latent, k_rope, offset, seen, padding, mask)
                state.latents[self.rope_dim > 0] = kept
        query_latent, source = self.query_latent(x)
        q_nope, q_rope, gate = self.queries(source, state, offset)
        if self._indexed:
            keys, gates = self.indexer.keys(x, state, offset)
            if index is not None:
                keys, gates = index.update_and_fetch(keys, gates)
                # Where nothing is picked yet the keys are in no result, and their graph would grow.
                latent = mx.depends(latent, [index.keys, index.values])
            picked = (
                self._pick(x, query_latent, keys, gates, state, offset, mask, padding) if sparse else None
            )
            state.picked_tokens = picked
        picked = state.picked_tokens if sparse else None
        if picked is not None and L == 1 and picked[1] is None:
            latent, k_rope = (_rows(t, picked[0]) for t in (latent, k_rope))
            mask = mx.take_along_axis(mask, picked[0], axis=-1) if mask is not None else None
        elif picked is not None:
            mask = chosen(*picked, latent.shape[2]) & (mask if mask is not None else mx.array(True))
        return self.output(self.attend_to_latents(q_nope, q_rope, latent, k_rope, mask), x, gate)

    def _caches(self, cache: Any) -> tuple[Any, Any]:
        """The caches of latents and of index keys, each None where the layer has none."""
        if cache is None:
            return None, None
        if self._borrows:
            return None, cache
        return (cache[0], cache[1]) if self._indexed else (cache, None)

    def _is_sparse(self, total: int) -> bool:
        """Whether a query may not see all of ``total`` tokens."""
        spec = self._dsa
        if not spec.index_pool:
            return total > spec.index_topk
        return not spec.index_keep_rest or total // spec.index_pool > spec.index_topk // spec.index_pool

    def _pick(
        self,
        x: mx.array,
        latent: mx.array,
        keys: mx.array,
        gates: mx.array,
        state: ForwardState,
        offset: Any,
        mask: mx.array | None,
        padding: mx.array | None,
    ) -> tuple[mx.array, mx.array | None]:
        """Indices [B, 1, L, K] of the picked tokens, in no particular order, and which of them count."""
        spec = self._dsa
        if spec.index_pool:
            return self._pick_pools(x, latent, keys, gates, state, offset, padding)
        scores = self.indexer.scores(x, latent, keys, state, offset)
        if spec.index_sinks or spec.index_recent:
            length, total = scores.shape[-2:]
            scores = mx.where(self._always(length, total, padding), mx.inf, scores)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        return best_of(scores, spec.index_topk), None

    def _always(self, length: int, total: int, padding: mx.array | None) -> mx.array:
        """Which of all tokens each query picks whatever their scores are, [B or 1, 1, L, T]."""
        tokens, first = mx.arange(total), 0 if padding is None else padding[:, None, None, None]
        places = (total - length + mx.arange(length))[:, None]
        recent = (tokens <= places) & (tokens > places - self._dsa.index_recent)
        return (tokens - first < self._dsa.index_sinks) | recent

    def _pick_pools(
        self,
        x: mx.array,
        latent: mx.array,
        keys: mx.array,
        gates: mx.array,
        state: ForwardState,
        offset: Any,
        padding: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """As :meth:`_pick`, whole pools, and the tokens behind the last whole one."""
        spec, pool = self._dsa, self._dsa.index_pool
        pooled = self.indexer.pooled(keys, gates, padding)
        if pooled.shape[2]:
            scores = self.indexer.scores(x, latent, pooled, state, offset)
        else:
            scores = mx.zeros((x.shape[0], 1, x.shape[1], 0))
        keep = spec.index_topk // pool
        return pick_pools(scores, keys.shape[2], pool, keep, padding, spec.index_keep_rest)

    @property
    def source(self) -> int | None:
        """The earlier layer whose picks or latents it uses."""
        both = [each for each in (self._source, super().source) if each is not None]
        return min(both, default=None)

    def make_cache(self) -> Any:
        """A cache of latents where the layer has its own, with one of index keys where it has an indexer."""
        if self._borrows:
            return KVCache() if self._indexed else None
        own = super().make_cache()
        return CacheList(own, KVCache()) if self._indexed else own


def _rows(held: mx.array, picked: mx.array) -> mx.array:
    """The picked tokens of ``held`` [B, 1, T, c], by ``picked`` [B, 1, 1, K]."""
    if not held.shape[-1]:
        return held
    index = mx.broadcast_to(picked[:, :, 0, :, None], (*picked.shape[:2], picked.shape[-1], held.shape[-1]))
    return mx.take_along_axis(held, index, axis=2)


def shares_selection(spec: DsaOptions, layer: int) -> bool:
    """Whether a layer uses an earlier layer's picks.

    Raises:
        ConfigError: the types are too few, or a word is not known.
    """
    if spec.index_types is None:
        return max(layer - spec.index_first + 1, 0) % max(spec.index_every, 1) != 0
    word = spec.index_types[layer] if layer < len(spec.index_types) else None
    if word not in _SHARED:
        raise ConfigError(
            "config.json does not say whether each layer has an indexer",
            where=f"indexer_types or index_topk_pattern, layer {layer}",
            expected=", ".join(_SHARED),
            found=repr(word),
        )
    return _SHARED[word]


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `dsa`."""
    return {"dsa": SparseAttention}
