"""What numba compiles of the fused CPU computation, for all formats at once: its order, and the router.

A stack comes as a vector of integers (``FUNCTION`` and following): addresses, shape and strides. Offsets are
64-bit. Nothing here checks shapes: the gate has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, prange, types
from numba.extending import intrinsic

(
    FUNCTION,  # compiled product of rows
    WEIGHT,
    SCALES,
    BIASES,  # 0 when the format has none
    BIAS,  # float32 [E, rows], or 0
    FACTOR,  # float32 [E], or 0
    PLANE_SCALES,  # float32 [P]
    ROWS,
    BLOCKS,  # blocks a row (n)
    WEIGHTS,  # weights a block (P)
    ROW_BYTES,
    SCALE_BYTES,  # bytes of scales, and of biases, a row
) = range(12)

# One task's rows of gate and up; whole blocks of down (at most 32 weights), so that tasks share none.
ROWS_AT_ONCE = 64
OUTPUTS_AT_ONCE = 32  # one task's rows of down

_FLOAT, _LONG = ir.FloatType(), ir.IntType(64)


@intrinsic
def _read(typingctx: Any, address: Any, index: Any) -> Any:
    """The float32 at an index from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _FLOAT.as_pointer()), [args[1]])
        return builder.load(pointer, align=4)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def _call_rows(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    x: Any, sums: Any, n: Any, out: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``rows_product`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 10)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def _call_activation(typingctx: Any, function: Any, g: Any, u: Any, alpha: Any, limit: Any) -> Any:
    """Call a compiled activation by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(_FLOAT, [_FLOAT] * 4)
        return builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])

    return types.float32(types.int64, *[types.float32] * 4), codegen


@njit(inline="always")
def _rows(stack, expert, first, count, x, sums, out):  # type: ignore[no-untyped-def]
    """``count`` rows of one expert times the input, with its factor and its biases, into ``out``."""
    at = expert * stack[ROWS] + first
    scales = at * stack[SCALE_BYTES]
    _call_rows(
        stack[FUNCTION],
        stack[WEIGHT] + at * stack[ROW_BYTES],
        stack[SCALES] + scales,
        stack[BIASES] + scales,
        stack[ROW_BYTES],
        stack[SCALE_BYTES],
        count,
        x.ctypes.data,
        sums.ctypes.data,
        stack[BLOCKS],
        out.ctypes.data,
    )
    if stack[FACTOR] != 0:
        for row in range(count):
            out[row] *= _read(stack[FACTOR], expert)
    if stack[BIAS] != 0:
        for row in range(count):
            out[row] += _read(stack[BIAS], at + row)


@njit(inline="always")
def _lay_out(stack, values, first, count, planes, sums):  # type: ignore[no-untyped-def]
    """Put inputs ``first`` and following, whole blocks of them, where the product of rows wants them."""
    size = stack[WEIGHTS]
    for i in range(count // size):
        block = first // size + i
        total = np.float32(0)
        for position in range(size):
            value = values[i * size + position]
            planes[position * stack[BLOCKS] + block] = value * _read(stack[PLANE_SCALES], position)
            total += value
        sums[block] = total


def _run(  # type: ignore[no-untyped-def]
    gated, gate, up, down, act, alpha, limit, num_experts, x, indices, weights, out
):
    """Fill ``out`` [H]; returns -1, or the position of the first index that is no expert.

    The input is laid out once for gate and once for up, since their formats may differ.
    """
    top_k, h, f = indices.size, x.size, up[ROWS]
    for k in range(top_k):
        if indices[k] < 0 or indices[k] >= num_experts:
            return k
    x_up, up_sums = np.empty(h, np.float32), np.empty(up[BLOCKS], np.float32)
    _lay_out(up, x, 0, h, x_up, up_sums)
    x_gate, gate_sums = np.empty(h, np.float32), np.empty(gate[BLOCKS], np.float32)
    if gated:
        _lay_out(gate, x, 0, h, x_gate, gate_sums)

    tasks = (f + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    hidden = np.empty((top_k, f), np.float32)
    hidden_sums = np.empty((top_k, down[BLOCKS]), np.float32)
    for task in prange(top_k * tasks):
        k, first = task // tasks, task % tasks * ROWS_AT_ONCE
        count = min(ROWS_AT_ONCE, f - first)
        u, g = np.empty(ROWS_AT_ONCE, np.float32), np.empty(ROWS_AT_ONCE, np.float32)
        _rows(up, indices[k], first, count, x_up, up_sums, u)
        if gated:
            _rows(gate, indices[k], first, count, x_gate, gate_sums, g)
        for row in range(count):
            u[row] = _call_activation(act, g[row] if gated else u[row], u[row], alpha, limit)
        _lay_out(down, u, first, count, hidden[k], hidden_sums[k])

    for task in prange((h + OUTPUTS_AT_ONCE - 1) // OUTPUTS_AT_ONCE):
        first = task * OUTPUTS_AT_ONCE
        count = min(OUTPUTS_AT_ONCE, h - first)
        part = np.empty(OUTPUTS_AT_ONCE, np.float32)
        total = np.zeros(OUTPUTS_AT_ONCE, np.float32)
        for k in range(top_k):
            _rows(down, indices[k], first, count, hidden[k], hidden_sums[k], part)
            for row in range(count):
                total[row] += weights[k] * part[row]
        for row in range(count):
            out[first + row] = total[row]
    return -1


def start_threads() -> None:
    """Start numba's threads so that they wait without spinning, unless the person set how they wait.

    To be called before anything parallel runs.

    MLX computes the rest of the model on threads of its own: an OpenMP thread that spins between two calls
    takes the core they need (measured on 2 shared cores: 40 ms a call, 3 ms without). OpenMP reads these
    variables once, when it is loaded.
    """
    quiet = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
    if not os.environ.keys() & {"OMP_WAIT_POLICY", *quiet}:
        os.environ.update(quiet)
    else:
        quiet = {}
    try:
        get_num_threads()
    finally:
        for name in quiet:
            del os.environ[name]


def _kept_on_disk(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """numba's compilation of a function, kept on disk where a folder for it can be written."""
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder, neither beside this file nor in the home folder
        return njit(**options)(function)


def _compile(name: str, parallel: bool) -> Callable[..., Any]:
    """numba files compiled code under the function's name, so the two forms of ``_run`` need two names."""
    function = FunctionType(_run.__code__.replace(co_name=name, co_qualname=name), globals(), name)
    function.__qualname__ = name
    return _kept_on_disk(function, parallel=parallel, nogil=True, error_model="numpy")


parallel = _compile("parallel", True)
serial = _compile("serial", False)


@njit(parallel=True, cache=False)
def checksum(numbers):  # type: ignore[no-untyped-def]
    """The sum of an array, as fast as the machine can read it: what bandwidth is measured with."""
    total = np.uint64(0)
    for i in prange(numbers.size):
        total += numbers[i]
    return total


SOFTMAX, SIGMOID, SQRTSOFTPLUS = range(3)
NO_NORM, SUM, CLAMP = range(3)


@njit
def _drop_groups(biased, groups, keep, best_two):  # type: ignore[no-untyped-def]
    """Put minus infinity where the worst groups of neighbouring experts are; of equal ones the last goes."""
    each = biased.size // groups
    worth, gone = np.empty(groups, np.float32), np.zeros(groups, np.bool_)
    for g in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for e in range(g * each, (g + 1) * each):
            if biased[e] > first:
                first, second = biased[e], first
            elif biased[e] > second:
                second = biased[e]
        worth[g] = first + second if best_two else first
    for _ in range(groups - keep):
        worst = -1
        for g in range(groups):
            if not gone[g] and (worst < 0 or worth[g] <= worth[worst]):
                worst = g
        gone[worst] = True
        for e in range(worst * each, (worst + 1) * each):
            biased[e] = -np.inf


def _route(  # type: ignore[no-untyped-def]
    logits, bias, score, groups, keep, best_two, normalise, eps, scale, chosen, share
):
    """Fill ``chosen`` and ``share`` [K] from ``logits`` [E]; ``bias`` [E] or nothing is for the selection."""
    count = logits.size
    scores, biased = np.empty(count, np.float32), np.empty(count, np.float32)
    top, sum_ = np.float32(-np.inf), np.float32(0)
    for e in range(count):
        top = max(top, logits[e])
    for e in range(count):
        v = logits[e]
        if score == SOFTMAX:
            scores[e] = math.exp(v - top)
            sum_ += scores[e]
        elif score == SIGMOID:
            scores[e] = 1.0 / (1.0 + math.exp(-v))
        else:
            scores[e] = math.sqrt(max(v, np.float32(0)) + math.log1p(math.exp(-abs(v))))
    for e in range(count):
        if score == SOFTMAX:
            scores[e] /= sum_
        biased[e] = scores[e] + bias[e] if bias.size else scores[e]
    if groups > 1 and keep < groups:
        _drop_groups(biased, groups, keep, best_two)
    used = np.zeros(count, np.bool_)
    total = np.float32(0)
    for k in range(chosen.size):
        best = -1
        for e in range(count):  # of equal experts the first one is picked; NaN never is before a number
            if not used[e] and (best < 0 or biased[e] > biased[best] or math.isnan(biased[best])):
                best = e
        used[best] = True
        chosen[k] = best
        share[k] = scores[best]
        total += scores[best]
    divisor = np.float32(1)
    if normalise == SUM:
        divisor = total + eps
    elif normalise == CLAMP:
        divisor = max(total, eps)
    if divisor == 0:
        # All scores underflowed.
        divisor = np.float32(1)
    for k in range(chosen.size):
        share[k] = share[k] / divisor * scale


route = _kept_on_disk(_route, nogil=True, error_model="numpy")
