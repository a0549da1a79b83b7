"""The order of the fused CPU computation, compiled once for all formats and once more without threads.

A stack comes as a vector of integers (``FUNCTION`` and following): addresses, shape and strides. Offsets are
64-bit. Nothing here checks shapes: the gate has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, prange, types
from numba.extending import intrinsic

from mlx_experts.engine.kernels.cpu_rows import read_f32

(
    FUNCTION,  # compiled row product
    WEIGHT,
    SCALES,
    BIASES,  # 0 when the format has none
    BIAS,  # float32 [E, rows], or 0
    FACTOR,  # float32 [E], or 0
    PLANE_SCALES,  # float32 [P]
    ROWS,
    BLOCKS,  # blocks a row (n)
    WEIGHTS,  # weights a block (P)
    GROUP,  # weights that share a scale; the whole row when plain
    ROW_BYTES,
    SCALE_BYTES,  # bytes of scales, and of biases, a row
) = range(13)

ROWS_AT_ONCE = 64  # one task's rows of gate and up; holds whole groups of down up to 64
OUTPUTS_AT_ONCE = 32  # one task's rows of down

_FLOAT, _LONG = ir.FloatType(), ir.IntType(64)


@intrinsic
def call_row(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, x: Any, sums: Any, n: Any, scratch: Any
) -> Any:
    """Call a compiled ``row_product`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(_FLOAT, [_LONG] * 7)
        return builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])

    return types.float32(*[types.int64] * 8), codegen


@intrinsic
def call_activation(typingctx: Any, function: Any, g: Any, u: Any, alpha: Any, limit: Any) -> Any:
    """Call a compiled activation by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(_FLOAT, [_FLOAT] * 4)
        return builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])

    return types.float32(types.int64, *[types.float32] * 4), codegen


@njit(inline="always")
def _row(stack, expert, row, x, sums, scratch):  # type: ignore[no-untyped-def]
    """Row ``row`` of one expert times the input, with its factor and its bias."""
    at = expert * stack[ROWS] + row
    scales = at * stack[SCALE_BYTES]
    value = call_row(
        stack[FUNCTION],
        stack[WEIGHT] + at * stack[ROW_BYTES],
        stack[SCALES] + scales,
        stack[BIASES] + scales,
        x,
        sums,
        stack[BLOCKS],
        scratch,
    )
    if stack[FACTOR] != 0:
        value *= read_f32(stack[FACTOR], expert)
    if stack[BIAS] != 0:
        value += read_f32(stack[BIAS], at)
    return value


@njit(inline="always")
def _place(stack, value, i, planes, sums):  # type: ignore[no-untyped-def]
    """Put input ``i`` where the row product wants it."""
    position, block = i % stack[WEIGHTS], i // stack[WEIGHTS]
    planes[position * stack[BLOCKS] + block] = value * read_f32(stack[PLANE_SCALES], position)
    sums[i // stack[GROUP]] += value


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
    x_up, x_gate = np.empty(h, np.float32), np.empty(h, np.float32)
    up_sums = np.zeros(h // up[GROUP], np.float32)
    gate_sums = np.zeros(h // gate[GROUP], np.float32)
    for i in range(h):
        _place(up, x[i], i, x_up, up_sums)
    if gated:
        for i in range(h):
            _place(gate, x[i], i, x_gate, gate_sums)

    at_once = max(ROWS_AT_ONCE, down[GROUP] if down[SCALES] != 0 else 0)
    tasks = (f + at_once - 1) // at_once
    hidden = np.empty((top_k, f), np.float32)
    hidden_sums = np.zeros((top_k, f // down[GROUP]), np.float32)
    for task in prange(top_k * tasks):
        scratch = np.empty(max(up[BLOCKS], gate[BLOCKS]), np.float32)
        k, first = task // tasks, task % tasks * at_once
        for row in range(first, min(first + at_once, f)):
            u = _row(up, indices[k], row, x_up.ctypes.data, up_sums.ctypes.data, scratch.ctypes.data)
            g = u
            if gated:
                g = _row(
                    gate, indices[k], row, x_gate.ctypes.data, gate_sums.ctypes.data, scratch.ctypes.data
                )
            _place(down, call_activation(act, g, u, alpha, limit), row, hidden[k], hidden_sums[k])

    for task in prange((h + OUTPUTS_AT_ONCE - 1) // OUTPUTS_AT_ONCE):
        scratch = np.empty(down[BLOCKS], np.float32)
        first = task * OUTPUTS_AT_ONCE
        end = min(first + OUTPUTS_AT_ONCE, h)
        out[first:end] = 0
        for k in range(top_k):
            for row in range(first, end):
                out[row] += weights[k] * _row(
                    down,
                    indices[k],
                    row,
                    hidden[k].ctypes.data,
                    hidden_sums[k].ctypes.data,
                    scratch.ctypes.data,
                )
    return -1


def _start_threads() -> None:
    """Start numba's threads so that they wait without spinning, unless the person set how they wait.

    MLX computes the rest of the model on threads of its own: an OpenMP thread that spins between two calls
    takes the core they need (measured on 2 shared cores: 40 ms a call, 3 ms without). OpenMP reads these
    variables once, when it is loaded.
    """
    quiet = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
    if not os.environ.keys() & {"OMP_WAIT_POLICY", *quiet}:
        os.environ.update(quiet)
    else:
        quiet = {}
    get_num_threads()
    for name in quiet:
        del os.environ[name]


def _compile(name: str, parallel: bool) -> Callable[..., Any]:
    """numba's compilation of ``_run``, kept on disk where a folder for it can be written.

    numba files compiled code under the function's name, so the two forms need two names.
    """
    function = FunctionType(_run.__code__.replace(co_name=name, co_qualname=name), globals(), name)
    function.__qualname__ = name
    options = {"parallel": parallel, "nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder, neither beside this file nor in the home folder
        return njit(**options)(function)


_start_threads()
parallel = _compile("parallel", True)
serial = _compile("serial", False)


@njit(parallel=True, cache=False)
def checksum(numbers):  # type: ignore[no-untyped-def]
    """The sum of an array, as fast as the machine can read it: what bandwidth is measured with."""
    total = np.uint64(0)
    for i in prange(numbers.size):
        total += numbers[i]
    return total
