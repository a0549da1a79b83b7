"""Token embeddings with hashed n-grams of the tokens before (LongCat-Flash-Lite, arXiv 2601.21204).

Legend: B batch, L tokens, D model width, n longest n-gram, k tables for each n-gram length.
"""

from __future__ import annotations

from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from pydantic import Field

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import look_up
from mlx_experts.engine.layers.options import check_parts, read_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import Plan
from mlx_experts.registry.spec.values import Count, NotNegative, Spec, Times


class NgramOptions(Spec):
    """Options of n-gram embeddings."""

    longest: Times = Field(description="Tokens of the longest n-gram, this token included.")
    tables: Times = Field(description="Tables for each n-gram length.")
    ratio: NotNegative = Field(
        description="Rows of a table, as a multiple of the vocabulary; 0 for no tables."
    )
    whole_token: bool = Field(False, description="Only the n-grams are divided by the number of embeddings.")
    boundary: Count | Annotated[list[Count], Field(min_length=1)] = Field(
        description="Tokens that no n-gram reaches across (end of a text)."
    )


class NgramEmbedding(nn.Module):
    """The mean of a token's embedding and those of the n-grams that end with it, or the token's apart.

    An n-gram's row is the polynomial hash of its ids in the base of the vocabulary, modulo the rows of
    its table; a missing token counts as id 0. N-grams stop behind a boundary token, as in the authors'
    code and unlike mlx-lm's.

    Args:
        plan: the model's plan; the embedding's options are :class:`NgramOptions`.

    Raises:
        ConfigError: there are tables and no n-grams, or the tables cannot share the model's width.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        sizes = plan.sizes
        spec = read_options(NgramOptions, plan.embedding.options, "n-gram embeddings")
        count, width = spec.tables * (spec.longest - 1), sizes.hidden_size
        if not spec.ratio:
            count = 0
        elif not count:
            raise ConfigError(
                "the longest n-gram is the token itself, so there are none",
                where="config.json or the family file, options of the n-gram embeddings",
                expected="`longest` of 2 or more",
                found=str(spec.longest),
                hint="correct `longest`, or give a `ratio` of 0 where the model has no tables",
            )
        else:
            check_parts(width, count, "the model's width cannot be divided among the n-gram tables")
        self._reach, self._tables, self._vocabulary = spec.longest - 1, spec.tables, sizes.vocab_size
        self._whole = spec.whole_token
        self._boundary = [spec.boundary] if isinstance(spec.boundary, int) else list(spec.boundary)
        # Odd sizes, all different, so that tables of one n-gram length hash differently.
        self._rows = [int(spec.ratio * sizes.vocab_size + 2 * i + 1) for i in range(count)]
        self.word_embeddings = nn.Embedding(sizes.vocab_size, width)
        self.embedders = [nn.Embedding(rows, width // count) for rows in self._rows]
        self.post_projs = [nn.Linear(width // count, width, bias=False) for _ in range(count)]

    def __call__(self, inputs: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """Token ids [B, L] to embeddings [B, L, D], reading and extending ``cache``."""
        # A hash is below vocabulary * rows, past 32 bits.
        ids = inputs.astype(mx.int64)
        before = self._before(ids, state.recurrent_mask(inputs, cache), cache)
        token = look_up(self.word_embeddings, inputs, state.dtype)
        h = mx.zeros_like(token) if self._whole else token
        for i, rows in enumerate(self._rows):
            row, power = ids, 1
            for previous in before[: i // self._tables + 1]:
                power = power * self._vocabulary % rows
                row = row + previous * power
            h = h + self.post_projs[i](look_up(self.embedders[i], row % rows, state.dtype))
        h = h / (1 + len(self._rows))
        return token + h if self._whole else h

    def _before(self, ids: mx.array, mask: mx.array | None, cache: Any) -> list[mx.array]:
        """The ids one, two, ... tokens before each token [B, L], 0 where there are none."""
        (B, L), reach, end = ids.shape, self._reach, self._boundary[0]
        if mask is not None:
            ids = mx.where(mask, ids, end)
        past = cache[0] if cache is not None else None
        if past is None:
            past = mx.full((B, reach), end, dtype=mx.int64)
        whole = mx.concatenate([past, ids], axis=1)
        if cache is not None:
            ends = mx.full((B,), L) if cache.lengths is None else mx.clip(cache.lengths, 0, L)
            cache[0] = mx.take_along_axis(whole, ends[:, None] + mx.arange(reach), axis=1)
            cache.advance(L)
        found, connected = [], mx.array(True)
        for distance in range(1, reach + 1):
            previous = whole[:, reach - distance : reach - distance + L]
            for boundary in self._boundary:
                connected = connected & (previous != boundary)
            found.append(mx.where(connected, previous, 0))
        return found

    def as_linear(self, h: mx.array) -> mx.array:
        """Logits of a head that is tied to the token embedding."""
        logits: mx.array = self.word_embeddings.as_linear(h)
        return logits

    def make_cache(self) -> ArraysCache:
        """The last n - 1 token ids [B, n - 1]."""
        return ArraysCache(size=1)


@hookimpl
def register_embeddings() -> dict[str, Any]:
    """The embedding `ngram`."""
    return {"ngram": NgramEmbedding}
