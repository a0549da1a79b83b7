"""Pools of tokens, and the cache of pooled states, against plain numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.layers.caches.pooled_cache import PooledCache
from mlx_experts.engine.layers.caches.token_pools import chosen, pick_pools, pools

SIZE, KEEP = 3, 2


def rows(length: int, width: int = 4) -> np.ndarray:
    return np.arange(length * width, dtype=np.float32).reshape(1, length, width)


def test_pools_start_at_the_first_real_token() -> None:
    held = np.random.default_rng(1).normal(size=(2, 1, 8, 4)).astype(np.float32)
    cut = np.array(pools(mx.array(held), SIZE, mx.array([0, 2])))
    assert np.array_equal(cut[0, 0], held[0, 0, :6].reshape(2, SIZE, 4))
    assert np.array_equal(cut[1, 0], held[1, 0, 2:8].reshape(2, SIZE, 4))


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("padding", [0, 2])
def test_queries_see_their_best_whole_pools_and_what_lies_behind(rest: bool, padding: int) -> None:
    total, queries = 11, 4
    whole = (total - padding) // SIZE
    scores = np.random.default_rng(2).normal(size=(1, 1, queries, whole)).astype(np.float32)
    at = None if not padding else mx.array([padding])
    picked, counts = pick_pools(mx.array(scores), total, SIZE, KEEP, at, rest)
    seen = np.array(chosen(picked, counts, total))[0, 0]
    for row in range(queries):
        tokens = total - queries + row + 1 - padding
        full = tokens // SIZE
        best = np.argsort(-scores[0, 0, row, :full])[:KEEP]
        want = {padding + int(p) * SIZE + i for p in best for i in range(SIZE)}
        if rest:
            want |= set(range(padding + full * SIZE, padding + tokens))
        assert set(np.flatnonzero(seen[row]).tolist()) == want


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [2, 5], [3, 1, 3]])
def test_a_pooled_cache_closes_groups_wherever_calls_end(pieces: list[int]) -> None:
    cache, given, closed = PooledCache(SIZE), rows(sum(pieces)), []
    start = 0
    for length in pieces:
        whole, before = cache.close(mx.array(given[:, start : start + length]))
        assert before == cache.count
        if whole.shape[1]:
            groups = np.array(whole).reshape(1, -1, SIZE, 4)
            closed.append(groups)
            cache.append(mx.array(groups.mean(axis=2)))
        start += length
    want = given[:, :6].reshape(1, 2, SIZE, 4)
    assert np.array_equal(np.concatenate(closed, axis=1), want)
    assert cache.pooled is not None
    assert np.array_equal(np.array(cache.pooled), want.mean(axis=2))
    assert cache.open is not None
    assert np.array_equal(np.array(cache.open), given[:, 6:])


def test_a_pooled_cache_comes_back_from_its_state() -> None:
    cache = PooledCache(SIZE)
    cache.close(mx.array(rows(4)))
    cache.append(mx.ones((1, 1, 4)))
    again = PooledCache.from_state(cache.state)
    assert (again.count, again.ratio, again.empty()) == (1, SIZE, False)
    assert again.nbytes > 0
    with pytest.raises(ValueError, match="does not support batching"):
        PooledCache.merge([cache, again])
