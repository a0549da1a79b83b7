"""What surrounds a decoder layer's matrices, for one token on the CPU: norms, rotation, attention, router.

MLX builds each of these from five to fifteen operations on the CPU and hands every one to another thread.
Here each is one call on arrays in memory, in float32. Legend: h query heads, g key-value heads, d head width,
S keys.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from mlx_experts.engine.kernels.cpu.numba_forms import (
    Forms,
    address,
    as_float,
    call_loop,
    kept_on_disk,
    number,
    packed,
    read,
    release,
    room,
    store,
    unpacked,
    write,
    zeros,
)

# Sums may be reordered; infinities and NaNs keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def _rms_norm(x, branch, total, weight, centre, eps, out):  # type: ignore[no-untyped-def]
    """Each row of ``x`` [R, D] over its root mean square, times ``centre + weight`` (or 1), to ``out``.

    Zhang and Sennrich 2019; ``weight`` [D] is empty where the norm has none. Where ``branch`` is not empty it
    is added to ``x`` first, and ``total`` is the sum.
    """
    if branch.size:
        for r in range(x.shape[0]):
            for i in range(x.shape[1]):
                total[r, i] = x[r, i] + branch[r, i]
    row = total if branch.size else x
    for r in range(x.shape[0]):
        squares = np.float32(0)
        for i in range(x.shape[1]):
            squares += row[r, i] * row[r, i]
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(x.shape[1]) + eps)
        if weight.size:
            for i in range(x.shape[1]):
                out[r, i] = row[r, i] * factor * (centre + weight[i])
        else:
            for i in range(x.shape[1]):
                out[r, i] = row[r, i] * factor


rms_norm = kept_on_disk(_rms_norm, nogil=True, error_model="numpy", fastmath=_FAST)


def _turned(x, weight, centre, eps, cos, sin, traditional, out):  # type: ignore[no-untyped-def]
    """Each row of ``x`` [h, d], normalised where ``weight`` [d] is not empty and turned, to ``out``.

    The first values of a row are turned by one angle a pair (Su et al. 2021). ``traditional`` pairs
    neighbours; otherwise the two halves of the rotated width are paired.
    """
    half, width = cos.size, x.shape[1]
    for r in range(x.shape[0]):
        if weight.size:
            squares = np.float32(0)
            for i in range(width):
                squares += x[r, i] * x[r, i]
            factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
            for i in range(width):
                out[r, i] = x[r, i] * factor * (centre + weight[i])
        else:
            for i in range(width):
                out[r, i] = x[r, i]
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if traditional else (i, i + half)
            a, b = out[r, first], out[r, second]
            out[r, first], out[r, second] = a * cos[i] - b * sin[i], a * sin[i] + b * cos[i]


turned = kept_on_disk(_turned, nogil=True, error_model="numpy", fastmath=_FAST)


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


@njit(error_model="numpy")
def _drop_groups(biased, count, groups, keep, best_two):  # type: ignore[no-untyped-def]
    """Put minus infinity where the worst groups of neighbouring experts are; of equal ones the last goes."""
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


def _route(  # type: ignore[no-untyped-def]
    logits_, bias_, score, groups, keep, best_two, normalise, eps, scale, chosen, share_
):
    """Fill ``chosen`` and ``share`` [K] from ``logits`` [E]; ``bias`` [E] or nothing is for the selection."""
    count, top_k, biases = logits_.size, chosen.size, bias_.size
    logits, bias, share = address(logits_), address(bias_), address(share_)
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
        write(biased, e, read(scores, e) + read(bias, e) if biases else read(scores, e))
    if groups > 1 and keep < groups:
        _drop_groups(biased, count, groups, keep, best_two)
    total = np.float32(0)
    for k in range(top_k):
        best = -1
        for e in range(count):  # of equal experts the first one is picked; NaN never is before a number
            if number(used, e) == 0:
                value = read(biased, e)
                if best < 0 or value > read(biased, best) or math.isnan(read(biased, best)):
                    best = e
        store(used, best, 1)
        chosen[k] = best
        write(share, k, read(scores, best))
        total += read(scores, best)
    divisor = np.float32(1)
    if normalise == SUM:
        divisor = total + eps
    elif normalise == CLAMP:
        divisor = max(total, eps)
    if divisor == 0:
        # All scores underflowed.
        divisor = np.float32(1)
    for k in range(top_k):
        write(share, k, read(share, k) / divisor * scale)
    release(scores, biased, used)


route = kept_on_disk(_route, nogil=True, error_model="numpy")
