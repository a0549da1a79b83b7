"""A prompt cache of states that are pooled over groups of tokens: whole groups, and the rows of the open one.

Legend: B batch, r tokens of a group, p rows of the open group, w width of a row, G whole groups, d their
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import _BaseCache


class PooledCache(_BaseCache):  # type: ignore[misc]
    """What a compressor keeps of its tokens; rows of a batch stand at one position.

    It cannot be trimmed, because the rows of a pooled group are gone, nor batched with others: groups of
    rows of other lengths close at other steps.

    Args:
        ratio: r.
    """

    step = 256

    def __init__(self, ratio: int) -> None:
        self.ratio, self.count = ratio, 0
        self.open: mx.array | None = None
        self.last: mx.array | None = None
        self._pooled: mx.array | None = None

    @classmethod
    def merge(cls, caches: Sequence[PooledCache]) -> PooledCache:
        """Refused in mlx-lm's words, which ask a cache for this before rows are put together."""
        raise ValueError(f"{cls.__name__} does not support batching: its groups close at other steps")

    def close(self, rows: mx.array) -> tuple[mx.array, int]:
        """Rows [B, n * r, w] of the groups that ``rows`` [B, L, w] fill, and how many groups came before."""
        if self.open is not None:
            rows = mx.concatenate([self.open, rows], axis=1)
        whole = rows.shape[1] // self.ratio * self.ratio
        # A copy, so that the cache does not hold the whole prompt alive.
        self.open = mx.contiguous(rows[:, whole:]) if whole < rows.shape[1] else None
        return rows[:, :whole], self.count

    def append(self, pooled: mx.array) -> None:
        """Keep groups [B, n, d]."""
        held, (B, n, d) = self._pooled, pooled.shape
        end = self.count + n
        if held is None or end > held.shape[1]:
            room = mx.zeros((B, -(-n // self.step) * self.step, d), pooled.dtype)
            held = room if held is None else mx.concatenate([held[:, : self.count], room], axis=1)
        held[:, self.count : end] = pooled
        self._pooled, self.count = held, end

    @property
    def pooled(self) -> mx.array | None:
        """The whole groups [B, G, d], or None without any."""
        return None if self._pooled is None else self._pooled[:, : self.count]

    @property
    def state(self) -> tuple[Any, ...]:
        """The groups, the open group's rows, what the last group leaves the next, and r."""
        return self.pooled, self.open, self.last, self.ratio

    @state.setter
    def state(self, v: tuple[Any, ...]) -> None:
        self._pooled, self.open, self.last, self.ratio = v
        self.count = 0 if self._pooled is None else self._pooled.shape[1]

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._pooled is None and self.open is None

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return sum(each.nbytes for each in (self._pooled, self.open, self.last) if each is not None)


# A saved cache names its classes, and `load_prompt_cache` knows those alone that stand in its own module.
setattr(mlx_lm_caches, PooledCache.__name__, PooledCache)
