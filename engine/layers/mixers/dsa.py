"""DeepSeek sparse attention (DeepSeek-V3.2, section 2.1): an indexer picks the tokens that MLA attends to.

Legend: B batch, L tokens, T cached tokens, K picked tokens, D model width, i index heads, d their width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mixers.mla import LatentAttention, MlaOptions, remember
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan, RopePlan
from mlx_experts.registry.spec.values import Count, Width

_SHARED = {"full": False, "F": False, "shared": True, "S": True}


class DsaOptions(MlaOptions):
    """Options of sparse latent attention."""

    index_heads: Width = Field(description="Heads of the indexer.")
    index_dim: Width = Field(description="Width of an index head; its first `rope_dim` values are rotated.")
    index_topk: Width = Field(description="Tokens that a query attends to.")
    index_style: Literal["half", "interleaved"] = Field(description="Which pairs of an index head rotate.")
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
        rope: rotary parameters of the layer.
    """

    def __init__(self, spec: DsaOptions, width: int, rope: RopePlan | None) -> None:
        super().__init__()
        assert spec.q_rank
        self.heads, self.dim = spec.index_heads, spec.index_dim
        self.wq_b = nn.Linear(spec.q_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(width, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = nn.Linear(width, self.heads, bias=False)
        turned = dataclasses.replace(rope, style=spec.index_style) if rope is not None else None
        self._rope = Rope(turned, spec.rope_dim, spec.index_dim) if turned is not None else None

    def keys(self, x: mx.array, offset: Any) -> mx.array:
        """Index keys [B, 1, L, d] of ``x`` [B, L, D]."""
        k = self.k_norm(self.wk(x))[:, None]
        return k if self._rope is None else self._rope(k, offset)

    def scores(self, x: mx.array, latent: mx.array, keys: mx.array, offset: Any) -> mx.array:
        """Scores [B, 1, L, T] in float32: each head's ReLU score, weighted by the query's token.

        Args:
            x: layer input [B, L, D].
            latent: query latent [B, L, q_rank].
            keys: index keys [B, 1, T, d].
        """
        B, L, _ = x.shape
        q = self.wq_b(latent).reshape(B, L, self.heads, self.dim).swapaxes(1, 2)
        q = (q if self._rope is None else self._rope(q, offset)).astype(mx.float32)
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
    ``models/glm_moe_dsa/modular_glm_moe_dsa.py``). While there are no more tokens than can be picked,
    attention is dense.

    Args:
        layer: the layer's plan; the mixer's options are :class:`DsaOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: queries have no latent, or the first layer has no indexer to attend by.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__(layer, plan)
        self._dsa = spec = mixer_options(DsaOptions, layer, "sparse attention")
        if not spec.q_rank:
            raise ConfigError(
                "an indexer needs a latent width of queries", where="config.json or the family file"
            )
        self._shared = shares_selection(spec, layer.index)
        if self._shared and layer.index == 0:
            raise ConfigError(
                "the first layer shares an indexer, and there is none before it",
                where="config.json or the family file",
            )
        earlier = range(layer.index - 1, -1, -1) if self._shared else ()
        self._source = next((i for i in earlier if not shares_selection(spec, i)), None)
        if not self._shared:
            self.indexer = Indexer(spec, layer.sizes.hidden_size, layer.rope)

    @classmethod
    def options_kind(cls) -> type[DsaOptions]:
        """The model that the mixer's options are read into."""
        return DsaOptions

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        own = cache if cache is None or self._shared else cache[0]
        L = x.shape[1]
        sparse = (own.size() if own is not None else 0) + L > self._dsa.index_topk
        offset = own.offset if own is not None else 0
        mask = state.attention_mask(x, own, as_array=sparse)
        query_latent = self.query_latent(x)
        queries = self.queries(query_latent, offset)
        latent, k_rope = self.latents(x, offset)
        if own is not None:
            latent, k_rope = remember(own, latent, k_rope)
        if not self._shared:
            keys = self._index_keys(x, offset, cache)
            picked = self._pick(x, query_latent, keys, offset, mask) if sparse else None
            state.picked_tokens = picked
        picked = state.picked_tokens if sparse else None
        if picked is not None and L == 1:
            latent, k_rope = (_rows(t, picked) for t in (latent, k_rope))
            mask = mx.take_along_axis(mask, picked, axis=-1) if mask is not None else None
        elif picked is not None:
            chosen = mx.zeros((*picked.shape[:-1], latent.shape[2]), dtype=mx.bool_)
            chosen = mx.put_along_axis(chosen, picked, mx.array(True), axis=-1)
            mask = chosen & mask
        return self.output(self.attend_to_latents(*queries, latent, k_rope, mask), x)

    def _index_keys(self, x: mx.array, offset: Any, cache: Any) -> mx.array:
        keys = self.indexer.keys(x, offset)
        if cache is None:
            return keys
        own, index = cache[0], cache[1]
        # Only keys are needed; one column stands in for the values that the cache expects.
        keys, _ = index.update_and_fetch(keys, keys[..., :1])
        # Where nothing is picked yet the keys are in no result, and their graph would grow with each token.
        own.keys = mx.depends(own.keys, [index.keys, index.values])
        return keys

    def _pick(
        self, x: mx.array, latent: mx.array, keys: mx.array, offset: Any, mask: mx.array | None
    ) -> mx.array:
        """Indices [B, 1, L, K] of the picked tokens, in no particular order."""
        scores = self.indexer.scores(x, latent, keys, offset)
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        k = self._dsa.index_topk
        return mx.stop_gradient(mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k])

    @property
    def source(self) -> int | None:
        """The earlier layer whose picks it uses."""
        return self._source

    def make_cache(self) -> Any:
        """A cache of latents, with one of index keys where the layer has an indexer."""
        return KVCache() if self._shared else CacheList(KVCache(), KVCache())


def _rows(held: mx.array, picked: mx.array) -> mx.array:
    """The picked tokens of ``held`` [B, 1, T, c], by ``picked`` [B, 1, 1, K]."""
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
