"""Attention of many rows on the CPU: prompts, and several sequences at once.

MLX 0.32 multiplies float32 matrices on the CPU at 3 GFLOP/s; here both products go through the tiles' dot
products, in float32, with the softmax between them. Legend: B batch, h query heads, g key-value heads, L
queries, S keys, d and e widths of keys and values.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from mlx_experts.engine.kernels.cpu.driver import DEPTH, _addresses, _room
from mlx_experts.engine.kernels.cpu.numba_forms import both_forms, call_dot
from mlx_experts.engine.kernels.cpu.products.tiles import PADDING

QUERIES = 24  # queries of a head that a task takes: whole steps of the dot products
HIDDEN = np.float32(np.finfo(np.float32).min)  # what MLX puts in the place of a hidden logit
_LEAST = np.float32(-87.0)  # exp of less is no normal float32

_FAST = {"reassoc", "contract", "nsz"}


@intrinsic
def _power_of_two(typingctx, exponent):  # type: ignore[no-untyped-def]
    """``2**exponent`` as float32, for exponents of normal numbers."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(32)
        raised = builder.add(args[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(raised, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@njit(error_model="numpy", fastmath=_FAST)
def _exp(x):  # type: ignore[no-untyped-def]
    """``exp`` of a number that is at most 0, to an ulp or two, as a vector (Cody and Waite 1980)."""
    bounded = _LEAST if x < _LEAST else x
    whole = np.floor(bounded * np.float32(1.44269504) + np.float32(0.5))
    rest = bounded - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * rest + np.float32(1.3981999507e-3)
    p = p * rest + np.float32(8.3334519073e-3)
    p = p * rest + np.float32(4.1665795894e-2)
    p = p * rest + np.float32(1.6666665459e-1)
    p = p * rest + np.float32(5.0000001201e-1)
    p = p * rest * rest + rest + np.float32(1.0)
    return np.float32(0.0) if x < _LEAST else p * _power_of_two(np.int32(whole))


@njit(error_model="numpy", fastmath=_FAST, nogil=True)
def _softmax(logits, seen, sink):  # type: ignore[no-untyped-def]
    """The softmax of the first ``seen`` logits in place, zeros behind; a sink only takes its share."""
    top = sink
    for s in range(seen):
        top = max(top, logits[s])
    total = np.float32(0)
    for s in range(seen):
        logits[s] = _exp(logits[s] - top)
        total += logits[s]
    if sink > HIDDEN:
        total += _exp(sink - top)
    factor = np.float32(1) / total
    for s in range(seen):
        logits[s] *= factor
    for s in range(seen, logits.size):
        logits[s] = 0


@njit(error_model="numpy", nogil=True)
def _dots(dot, rows, number, inputs, outputs):  # type: ignore[no-untyped-def]
    """Products of the first ``number`` of ``rows`` [R, P] with inputs, by their addresses, to outputs."""
    width = rows.shape[1]
    for offset in range(0, width, DEPTH):
        call_dot(
            dot,
            rows.ctypes.data,
            width * 4,
            number,
            inputs.ctypes.data,
            outputs.ctypes.data,
            inputs.size,
            offset,
            min(DEPTH, width - offset),
            0,
            offset,
        )


@njit(error_model="numpy", nogil=True)
def _turn(values, first, count, turned):  # type: ignore[no-untyped-def]
    """``count`` rows of ``values`` from ``first`` on as the columns of ``turned`` [e, P], zeros behind."""
    for begin in range(0, count, 16):
        end = min(begin + 16, count)
        for i in range(turned.shape[0]):
            for s in range(begin, end):
                turned[i, s] = values[first + s, i]
    for i in range(turned.shape[0]):
        for s in range(count, turned.shape[1]):
            turned[i, s] = 0


@njit(error_model="numpy", nogil=True)
def _padded(rows, first, count, scale, made):  # type: ignore[no-untyped-def]
    """``count`` rows from ``first`` on, times ``scale``, in ``made`` with zeros behind each."""
    for r in range(count):
        for i in range(rows.shape[1]):
            made[r, i] = rows[first + r, i] * scale
        for i in range(rows.shape[1], made.shape[1]):
            made[r, i] = 0


def _attend_many(dot, sizes, q, keys, values, scale, before, mask, sinks, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` [B L h, e] from ``q`` [B h L, d], ``keys`` [B g S, d] and ``values`` [B g S, e].

    ``sizes`` are B, h, g, L and S. ``before`` keys are seen by the first query and one more by each next one;
    all by each where it is negative. ``mask`` [B L, S] (or [L, S], or empty) hides more. ``sinks`` [h] may be
    empty. Rows of rows, and no slices that are written to: numba compiles those for seconds.
    """
    batch, heads, groups, length, seen = sizes
    share, depth = heads // groups, values.shape[1]
    wide = (q.shape[1] + PADDING - 1) // PADDING * PADDING
    long = (seen + PADDING - 1) // PADDING * PADDING
    by_key, by_value = _room(batch * groups * seen, wide), _room(batch * groups * depth, long)
    for pair in prange(batch * groups):
        some = by_key[pair * seen : (pair + 1) * seen]
        _padded(keys, pair * seen, seen, np.float32(1), some)
        _turn(values, pair * seen, seen, by_value[pair * depth : (pair + 1) * depth])

    blocks = (length + QUERIES - 1) // QUERIES
    for task in prange(batch * heads * blocks):
        # The last queries see most: they go first.
        block, b, head = blocks - 1 - task // (batch * heads), task // heads % batch, task % heads
        first = block * QUERIES
        count = min(QUERIES, length - first)
        ours, logits, found = _room(count, wide), _room(count, long), _room(count, depth)
        _padded(q, (b * heads + head) * length + first, count, scale, ours)
        reach = seen if before < 0 else min(seen, before + first + count)
        pair = b * groups + head // share
        to_logits = _addresses(logits)
        _dots(dot, by_key[pair * seen : (pair + 1) * seen], reach, _addresses(ours), to_logits)
        sink = sinks[head] if sinks.size else HIDDEN
        for r in range(count):
            limit = reach if before < 0 else min(seen, before + first + r + 1)
            if mask.size:
                row = (b * length + first + r) % mask.shape[0]
                for s in range(limit):
                    if not mask[row, s]:
                        logits[r, s] = HIDDEN
            _softmax(logits[r], limit, sink)
        _dots(dot, by_value[pair * depth : (pair + 1) * depth], depth, to_logits, _addresses(found))
        for r in range(count):
            target = (b * length + first + r) * heads + head
            for i in range(depth):
                out[target, i] = found[r, i]


attend_many = both_forms(_attend_many)
