"""Pools of consecutive tokens that are picked as one, and the tokens behind the last whole pool.

Pools are counted from a sequence's first real token, so that padding on the left moves none of their borders.
Legend: B batch, L tokens, T cached tokens, G whole pools, S tokens of a pool, K picked pools.
"""

from __future__ import annotations

import mlx.core as mx


def pools(held: mx.array, size: int, padding: mx.array | None) -> mx.array:
    """States [B, 1, T, d] as whole pools [B, 1, G, S, d].

    Args:
        padding: columns [B] before the first real token of each row, or None.
    """
    count = held.shape[2] // size
    if padding is not None:
        places = mx.minimum(mx.arange(count * size) + padding[:, None], held.shape[2] - 1)
        places = mx.broadcast_to(places[:, None, :, None], (*held.shape[:2], count * size, held.shape[-1]))
        held = mx.take_along_axis(held, places, axis=2)
    return mx.unflatten(held[:, :, : count * size], 2, (count, size))


def pick_pools(
    scores: mx.array, total: int, size: int, keep: int, padding: mx.array | None, rest: bool
) -> tuple[mx.array, mx.array]:
    """The tokens of the best pools that each query sees whole.

    Args:
        scores: [B, 1, L, G].
        total: T.
        size: S.
        keep: K at most.
        rest: the tokens that a query sees behind its last whole pool are picked too.

    Returns:
        Indices [B, 1, L, n] of cached tokens, and which of them count, [B, 1, L, n].
    """
    B, _, L, G = scores.shape
    first = 0 if padding is None else padding[:, None, None, None]
    seen = (total - L + mx.arange(L))[None, None, :, None] - first + 1
    parts, valid = [], []
    if G:
        scores = mx.where(mx.arange(G) < seen // size, scores, -mx.inf)
        best = best_of(scores, min(keep, G))
        tokens = (best * size)[..., None] + mx.arange(size)
        parts.append(tokens.flatten(-2) + first)
        valid.append(mx.repeat(mx.broadcast_to(best < seen // size, best.shape), size, axis=-1))
    if rest and size > 1:
        behind, shape = mx.arange(size - 1), (B, 1, L, size - 1)
        parts.append(mx.broadcast_to(first + seen // size * size + behind, shape))
        valid.append(mx.broadcast_to(behind < seen % size, shape))
    return mx.concatenate(parts, axis=-1), mx.concatenate(valid, axis=-1)


def best_of(scores: mx.array, k: int) -> mx.array:
    """Indices [..., k] of the highest scores, in no particular order."""
    return mx.stop_gradient(mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k])


def chosen(picked: mx.array, counts: mx.array | None, length: int) -> mx.array:
    """Which of ``length`` tokens are among those of ``picked`` [B, 1, L, n] that count, [B, 1, L, length]."""
    if counts is not None:
        picked = mx.where(counts, picked, length)
    among = mx.zeros((*picked.shape[:-1], length + 1), dtype=mx.bool_)
    return mx.put_along_axis(among, picked, mx.array(True), axis=-1)[..., :length]
