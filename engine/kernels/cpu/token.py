"""What surrounds a decoder layer's matrices, for one token on the CPU: norms, rotation, attention, router.

MLX builds each of these from five to fifteen operations on the CPU and hands every one to another thread.
Here each is one call on arrays in memory, in float32. Legend: h query heads, g key-value heads, d head width,
S keys.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from mlx_experts.engine.kernels.cpu import driver
from mlx_experts.engine.kernels.cpu.intrinsics import (
    address,
    as_float,
    call_loop,
    call_part,
    number,
    packed,
    read,
    release,
    room,
    store,
    store32,
    unpacked,
    write,
    zeros,
)
from mlx_experts.engine.kernels.cpu.numba_forms import Forms, Part, one_by_one

# Sums may be reordered; infinities and NaNs keep their meaning.
_BITS = np.uint32
_FAST = {"reassoc", "contract", "nsz"}


@njit(error_model="numpy", fastmath=_FAST)
def norm_row(x, width, weight, centre, eps, out):  # type: ignore[no-untyped-def]
    """One row over its root mean square, times ``centre + weight``; ``weight`` is 0 where there is none."""
    squares = np.float32(0)
    for i in range(width):
        squares += read(x, i) * read(x, i)
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
    if weight != 0:
        for i in range(width):
            write(out, i, read(x, i) * factor * (centre + read(weight, i)))
    else:
        for i in range(width):
            write(out, i, read(x, i) * factor)


LAID_OUT = 3  # numbers of a matrix for which an input is laid out: stack, input, its sums


def _normed(task, context):  # type: ignore[no-untyped-def]
    """A row, or its sum with a branch, through a norm where there is one, and laid out for some matrices."""
    x, branch, total, norm, weight, centre, eps, width, out, matrices, count = unpacked(context, 11)
    values = x + task * width * 4
    if branch != 0:
        for i in range(width):
            write(total, i, read(values, i) + read(branch, i))
        values = total
    if norm != 0:
        norm_row(values, width, weight, as_float(centre), as_float(eps), out)
        values = out
    for i in range(count):
        at = matrices + i * LAID_OUT * 8
        stack, planes, sums = number(at, 0), number(at, 1), number(at, 2)
        sums += task * 8 * number(stack, driver.BLOCKS)
        driver.lay_out(stack, values, 0, width, planes + task * width * 4, sums)


# Not fast itself: what it calls would inherit that in some processes and not in others.
NORMED = Part(_normed)


def rms_norm(
    x: np.ndarray,
    branch: np.ndarray | None,
    weight: np.ndarray,
    centre: np.float32,
    eps: np.float32,
    out: np.ndarray,
    total: np.ndarray | None = None,
) -> None:
    """A row [1, D] over its root mean square, times ``centre + weight`` or 1; Zhang and Sennrich 2019.

    Args:
        branch: is added to ``x`` first, and ``total`` receives the sum; None for nothing.
        weight: [D], empty where the norm has none.
    """
    added = (
        (0, 0)
        if branch is None or total is None
        else (branch.__array_interface__["data"][0], total.__array_interface__["data"][0])
    )
    scales = weight.__array_interface__["data"][0] if weight.size else 0
    at = x.__array_interface__["data"][0]
    norm = (1, scales, int(centre.view(_BITS)), int(eps.view(_BITS)), x.size)
    held = np.array((at, *added, *norm, out.__array_interface__["data"][0], 0, 0), np.int64)
    one_by_one()(NORMED.address, 1, held.__array_interface__["data"][0])


@njit(error_model="numpy", fastmath=_FAST)
def turned_row(x, width, weight, centre, eps, cos, sin, half, pairs, out):  # type: ignore[no-untyped-def]
    """One head, normalised where ``weight`` is not 0, and its first values turned; see ``turned``."""
    if weight != 0:
        norm_row(x, width, weight, centre, eps, out)
    else:
        for i in range(width):
            write(out, i, read(x, i))
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if pairs else (i, i + half)
        a, b, c, s = read(out, first), read(out, second), read(cos, i), read(sin, i)
        write(out, first, a * c - b * s)
        write(out, second, a * s + b * c)


def _turned(task, context):  # type: ignore[no-untyped-def]
    """One head of the queries; behind those one of the keys and of the values, to the cache."""
    (
        q, queries, k, keys, v, values, heads, width, depth, rows, position, q_weight, q_centre, q_eps,
        k_weight, k_centre, k_eps, cos, sin, half, pairs,
    ) = unpacked(context, 21)  # fmt: skip
    x, out, weight, centre, eps = q + task * width * 4, queries + task * width * 4, q_weight, q_centre, q_eps
    if task >= heads:
        g = task - heads
        at = g * rows + position
        x, out, weight, centre, eps = k + g * width * 4, keys + at * width * 4, k_weight, k_centre, k_eps
        for i in range(depth):
            write(values, at * depth + i, read(v, g * depth + i))
    turned_row(x, width, weight, as_float(centre), as_float(eps), cos, sin, half, pairs, out)


TURNED = Part(_turned)


def turned(
    x: np.ndarray,
    weight: np.ndarray,
    centre: np.float32,
    eps: np.float32,
    cos: np.ndarray,
    sin: np.ndarray,
    traditional: bool,
    out: np.ndarray,
) -> None:
    """Each row of ``x`` [h, d], normalised where ``weight`` [d] is not empty and turned, to ``out``.

    The first values of a row are turned by one angle a pair (Su et al. 2021). ``traditional`` pairs
    neighbours; otherwise the two halves of the rotated width are paired.
    """
    heads, width = x.shape
    norm = (
        weight.__array_interface__["data"][0] if weight.size else 0,
        int(centre.view(_BITS)),
        int(eps.view(_BITS)),
    )
    angles = (cos.__array_interface__["data"][0], sin.__array_interface__["data"][0], cos.size, traditional)
    context = (
        x.__array_interface__["data"][0],
        out.__array_interface__["data"][0],
        0,
        0,
        0,
        0,
        heads,
        width,
        0,
        0,
        0,
        *norm,
        0,
        0,
        0,
        *angles,
    )
    held = np.array(context, np.int64)
    one_by_one()(TURNED.address, heads, held.__array_interface__["data"][0])


def _attend_head(head, context):  # type: ignore[no-untyped-def]
    """One query head."""
    q, keys, values, share, seen, rows, width, depth, scale, out = unpacked(context, 10)
    query, row = q + head * width * 4, out + head * depth * 4
    k, v = keys + head // share * rows * width * 4, values + head // share * rows * depth * 4
    logits = room(seen * 4)
    top = np.float32(-math.inf)
    for s in range(seen):
        total = np.float32(0)
        for i in range(width):
            total += read(query, i) * read(k, s * width + i)
        logit = total * as_float(scale)
        write(logits, s, logit)
        top = max(top, logit)
    for i in range(depth):
        write(row, i, np.float32(0))
    whole = np.float32(0)
    for s in range(seen):
        weight = np.exp(read(logits, s) - top)
        whole += weight
        for i in range(depth):
            write(row, i, read(row, i) + weight * read(v, s * depth + i))
    for i in range(depth):
        write(row, i, read(row, i) / whole)
    release(logits)


def _attend(loop, attend_head, q, keys, values, length, scale, out):  # type: ignore[no-untyped-def]
    """Softmax attention of ``q`` [h, d] to the first ``length`` of ``keys`` [g, S, d], ``values`` [g, S, e].

    ``out`` is [h, e]. The softmax is shifted by its largest logit (Vaswani et al. 2017; Ainslie et al. 2023).
    """
    heads, width = q.shape
    share, rows, depth = heads // keys.shape[0], keys.shape[1], values.shape[2]
    context = packed(
        address(q), address(keys), address(values), share, length, rows, width, depth, scale, address(out)
    )
    call_loop(loop, attend_head, heads, context)


attend = Forms(_attend, _attend_head, fastmath=_FAST)


SOFTMAX, SIGMOID, SQRTSOFTPLUS = range(3)
NO_NORM, SUM, CLAMP = range(3)


def _without_groups(task, context):  # type: ignore[no-untyped-def]
    """Put minus infinity where the worst groups of neighbouring experts are; of equal ones the last goes."""
    biased, count, groups, keep, best_two = unpacked(context, 5)
    each, low = count // groups, np.float32(-np.inf)
    worth, gone = room(groups * 4), zeros(groups * 8)
    for g in range(groups):
        first, second = low, low
        for e in range(g * each, (g + 1) * each):
            value = read(biased, e)
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        write(worth, g, first + second if best_two else first)
    for _ in range(groups - keep):
        worst = -1
        for g in range(groups):
            if number(gone, g) == 0 and (worst < 0 or read(worth, g) <= read(worth, worst)):
                worst = g
        store(gone, worst, 1)
        for e in range(worst * each, (worst + 1) * each):
            write(biased, e, low)
    release(worth, gone)


WITHOUT_GROUPS = Part(_without_groups)
"""A part of its own: it takes a third of a second to compile, and most routers have no groups."""


def _routed(task, context):  # type: ignore[no-untyped-def]
    """The experts of a token and their shares; see ``route``."""
    (
        logits, count, bias, score, without, groups, keep, best_two, normalise, eps, scale, top_k, chosen,
        share,
    ) = unpacked(context, 14)  # fmt: skip
    scores, biased, used = room(count * 4), room(count * 4), zeros(count * 8)
    top, sum_ = np.float32(-np.inf), np.float32(0)
    for e in range(count):
        top = max(top, read(logits, e))
    for e in range(count):
        v = read(logits, e)
        if score == SOFTMAX:
            power = np.float32(math.exp(v - top))
            write(scores, e, power)
            sum_ += power
        elif score == SIGMOID:
            write(scores, e, np.float32(1.0 / (1.0 + math.exp(-v))))
        else:
            soft = max(v, np.float32(0)) + math.log1p(math.exp(-abs(v)))
            write(scores, e, np.float32(math.sqrt(soft)))
    for e in range(count):
        if score == SOFTMAX:
            write(scores, e, read(scores, e) / sum_)
        write(biased, e, read(scores, e) + read(bias, e) if bias != 0 else read(scores, e))
    if without != 0:
        call_part(without, 0, packed(biased, count, groups, keep, best_two))
    total = np.float32(0)
    for k in range(top_k):
        best = -1
        for e in range(count):  # of equal experts the first one is picked; NaN never is before a number
            if number(used, e) == 0:
                value = read(biased, e)
                if best < 0 or value > read(biased, best) or math.isnan(read(biased, best)):
                    best = e
        store(used, best, 1)
        store32(chosen, k, best)
        write(share, k, read(scores, best))
        total += read(scores, best)
    divisor = np.float32(1)
    if normalise == SUM:
        divisor = total + as_float(eps)
    elif normalise == CLAMP:
        divisor = max(total, as_float(eps))
    if divisor == 0:
        # All scores underflowed.
        divisor = np.float32(1)
    for k in range(top_k):
        write(share, k, read(share, k) / divisor * as_float(scale))
    release(scores, biased, used)


ROUTED = Part(_routed)


def route(
    logits: np.ndarray, bias: np.ndarray, how: tuple[int, ...], chosen: np.ndarray, share: np.ndarray
) -> None:
    """Fill ``chosen`` (uint32) and ``share`` [K] from float32 ``logits`` [E].

    Args:
        bias: [E] or nothing, for the selection.
        how: the score, the address of what leaves groups out or 0, the groups, how many are kept, whether by
            the best two of each, how shares are normalised, and the bits of epsilon and of their factor.
    """
    tilt = bias.__array_interface__["data"][0] if bias.size else 0
    picked = (chosen.size, chosen.__array_interface__["data"][0], share.__array_interface__["data"][0])
    held = np.array((logits.__array_interface__["data"][0], logits.size, tilt, *how, *picked), np.int64)
    one_by_one()(ROUTED.address, 1, held.__array_interface__["data"][0])
