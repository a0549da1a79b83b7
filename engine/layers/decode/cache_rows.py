"""Where one more position of mlx-lm's key-value cache is written in memory, without an operation of MLX's.

MLX writes into an array in place only where nobody else holds its data, and copies it otherwise. A write past
MLX needs the same certainty: the first one gives the cache arrays that nobody else has. Who copies the cache
later shares them up to its own offset, behind which the writes go on.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.kernels.cpu import stacks


class Place(NamedTuple):
    """Where a cache's keys [g, rows, d] and values [g, rows, e] lie, and how many positions are filled."""

    keys: int
    values: int
    rows: int
    position: int


@dataclass(eq=False)
class _Own:
    """The arrays that a cache was given, and the first position that was not written."""

    keys: Any
    values: Any
    place: tuple[int, ...]
    rows: int
    position: int


_BYTES = 4  # of a float32
_OWN: weakref.WeakKeyDictionary[KVCache, _Own] = weakref.WeakKeyDictionary()


def next_place(cache: KVCache, groups: int, width: int, depth: int) -> Place | None:
    """Where the next position goes; None for an empty cache, several sequences, or arrays of another shape.

    The caller writes it, and raises the cache's offset.

    Args:
        groups: g; ``width`` is d, and ``depth`` e.
    """
    keys, values, position = cache.keys, cache.values, cache.offset
    own = _OWN.get(cache)
    if (
        own is None
        or own.keys() is not keys
        or own.values() is not values
        # An offset that was set back, behind which others may hold what lies there, or a full array.
        or not own.position == position < own.rows
        or stacks.addresses((keys, values)) != own.place
        # MLX wrote in this place meanwhile, and was set back.
        or not _blank(own.place[0] + position * width * _BYTES, width * _BYTES)
    ):
        if not _fits(cache, groups, width, depth):
            return None
        own = _OWN[cache] = _given(cache)
    own.position = position + 1
    return Place(own.place[0], own.place[1], own.rows, position)


def _fits(cache: KVCache, groups: int, width: int, depth: int) -> bool:
    """Whether a cache holds one sequence of such keys and values in float32. It may come from a file."""
    keys, values = cache.keys, cache.values
    if not cache.offset or (keys.dtype, values.dtype) != (mx.float32, mx.float32):
        return False
    rows = keys.shape[2]
    shapes = (1, groups, rows, width), (1, groups, rows, depth)
    return (keys.shape, values.shape) == shapes and cache.offset <= rows


def _blank(address: int, count: int) -> bool:
    return ctypes.string_at(address, count).count(0) == count


def _given(cache: KVCache) -> _Own:
    """Give a cache arrays of its own with what it holds, zero behind that, and room for one more position."""
    rows = cache.keys.shape[2]
    if cache.offset >= rows:
        rows = cache.offset + cache.step

    def copied(array: mx.array) -> mx.array:
        shape = (*array.shape[:2], rows - cache.offset, array.shape[3])
        return mx.concatenate([array[..., : cache.offset, :], mx.zeros(shape, array.dtype)], axis=2)

    cache.keys, cache.values = copied(cache.keys), copied(cache.values)
    mx.eval(cache.keys, cache.values)
    places = stacks.addresses((cache.keys, cache.values))
    return _Own(weakref.ref(cache.keys), weakref.ref(cache.values), places, rows, cache.offset)
