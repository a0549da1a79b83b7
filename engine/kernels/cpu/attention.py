"""Attention of many rows on the CPU: prompts, and several sequences at once.

MLX 0.32 multiplies float32 matrices on the CPU at 3 GFLOP/s; here both products go through the tiles' dot
products, in float32, with the softmax between them. Legend: B batch, h query heads, g key-value heads, L
queries, S keys, d and e widths of keys and values.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mlx_experts.engine.kernels.cpu.driver import DEPTH
from mlx_experts.engine.kernels.cpu.intrinsics import (
    address,
    as_float,
    byte,
    call_dot,
    call_loop,
    packed,
    read,
    release,
    room,
    store,
    unpacked,
    write,
    zeros,
)
from mlx_experts.engine.kernels.cpu.numba_forms import Forms
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


@njit(error_model="numpy", fastmath=_FAST)
def _softmax(logits, seen, width, sink):  # type: ignore[no-untyped-def]
    """The softmax of the first ``seen`` logits in place, zeros behind; a sink only takes its share."""
    top = sink
    for s in range(seen):
        top = max(top, read(logits, s))
    total = np.float32(0)
    for s in range(seen):
        power = _exp(read(logits, s) - top)
        write(logits, s, power)
        total += power
    if sink > HIDDEN:
        total += _exp(sink - top)
    factor = np.float32(1) / total
    for s in range(seen):
        write(logits, s, read(logits, s) * factor)
    for s in range(seen, width):
        write(logits, s, np.float32(0))


@njit(error_model="numpy")
def _dots(dot, rows, width, number, inputs, outputs, count):  # type: ignore[no-untyped-def]
    """Products of ``number`` rows of ``width`` floats with inputs, by their addresses, to outputs."""
    for offset in range(0, width, DEPTH):
        length = min(DEPTH, width - offset)
        call_dot(dot, rows, width * 4, number, inputs, outputs, count, offset, length, 0, offset)


@njit(error_model="numpy")
def _list_rows(listed, rows, count, width):  # type: ignore[no-untyped-def]
    """The addresses of rows of ``width`` floats."""
    for r in range(count):
        store(listed, r, rows + r * width * 4)


@njit(error_model="numpy")
def _turn(values, count, depth, turned, width):  # type: ignore[no-untyped-def]
    """``count`` rows of ``depth`` values as the columns of ``turned`` [e, P], which holds zeros."""
    for begin in range(0, count, 16):
        end = min(begin + 16, count)
        for i in range(depth):
            for s in range(begin, end):
                write(turned, i * width + s, read(values, s * depth + i))


@njit(error_model="numpy")
def _padded(rows, count, depth, scale, made, width):  # type: ignore[no-untyped-def]
    """``count`` rows, times ``scale``, in ``made``, whose longer rows hold zeros."""
    for r in range(count):
        for i in range(depth):
            write(made, r * width + i, read(rows, r * depth + i) * scale)


def _lay_out_keys(pair, context):  # type: ignore[no-untyped-def]
    """The keys of a head in rows as the dot products read them, and its values as columns."""
    keys, values, by_key, by_value, seen, d, depth, wide, long = unpacked(context, 9)
    kept = by_key + pair * seen * wide * 4
    _padded(keys + pair * seen * d * 4, seen, d, np.float32(1), kept, wide)
    _turn(values + pair * seen * depth * 4, seen, depth, by_value + pair * depth * long * 4, long)


def _attend_block(task, context):  # type: ignore[no-untyped-def]
    """Some queries of one head."""
    (
        dot, q, by_key, by_value, out, batch, heads, groups, length, seen, d, depth, wide, long, blocks,
        before, mask, mask_rows, sinks, scale_bits,
    ) = unpacked(context, 20)  # fmt: skip
    # The last queries see most: they go first.
    block, b, head = blocks - 1 - task // (batch * heads), task // heads % batch, task % heads
    first = block * QUERIES
    count = min(QUERIES, length - first)
    ours, logits, found = zeros(count * wide * 4), room(count * long * 4), room(count * depth * 4)
    from_ours, from_logits, to_found = room(count * 8), room(count * 8), room(count * 8)
    _list_rows(from_ours, ours, count, wide)
    _list_rows(from_logits, logits, count, long)
    _list_rows(to_found, found, count, depth)
    _padded(q + ((b * heads + head) * length + first) * d * 4, count, d, as_float(scale_bits), ours, wide)
    reach = seen if before < 0 else min(seen, before + first + count)
    pair = b * groups + head // (heads // groups)
    _dots(dot, by_key + pair * seen * wide * 4, wide, reach, from_ours, from_logits, count)
    sink = read(sinks, head) if sinks != 0 else HIDDEN
    for r in range(count):
        limit = reach if before < 0 else min(seen, before + first + r + 1)
        ours_at = logits + r * long * 4
        if mask_rows != 0:
            row = (b * length + first + r) % mask_rows
            for s in range(limit):
                if byte(mask, row * seen + s) == 0:
                    write(ours_at, s, HIDDEN)
        _softmax(ours_at, limit, long, sink)
    _dots(dot, by_value + pair * depth * long * 4, long, depth, from_logits, to_found, count)
    for r in range(count):
        target = ((b * length + first + r) * heads + head) * depth
        for i in range(depth):
            write(out, target + i, read(found, r * depth + i))
    release(ours, logits, found, from_ours, from_logits, to_found)


def _attend_many(  # type: ignore[no-untyped-def]
    loop, lay_out_keys, attend_block, dot, sizes, q, keys, values, scale, before, mask, sinks, out
):
    """Fill ``out`` [B L h, e] from ``q`` [B h L, d], ``keys`` [B g S, d] and ``values`` [B g S, e].

    ``sizes`` are B, h, g, L and S. ``before`` keys are seen by the first query and one more by each next one;
    all by each where it is negative. ``mask`` [B L, S] (or [L, S], or empty) hides more. ``sinks`` [h] may be
    empty.
    """
    batch, heads, groups, length, seen = sizes
    d, depth = q.shape[1], values.shape[1]
    wide = (d + PADDING - 1) // PADDING * PADDING
    long = (seen + PADDING - 1) // PADDING * PADDING
    by_key, by_value = zeros(batch * groups * seen * wide * 4), zeros(batch * groups * depth * long * 4)
    laid = packed(address(keys), address(values), by_key, by_value, seen, d, depth, wide, long)
    call_loop(loop, lay_out_keys, batch * groups, laid)

    blocks = (length + QUERIES - 1) // QUERIES
    context = packed(
        dot, address(q), by_key, by_value, address(out), batch, heads, groups, length, seen, d, depth, wide,
        long, blocks, before, address(mask), mask.shape[0] if mask.size else 0,
        address(sinks) if sinks.size else 0, scale,
    )  # fmt: skip
    call_loop(loop, attend_block, batch * heads * blocks, context)
    release(by_key, by_value)


attend_many = Forms(_attend_many, _lay_out_keys, _attend_block)
