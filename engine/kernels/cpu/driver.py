"""What numba compiles of the CPU computation, for all formats at once: its order, and the router.

One row goes through products of packed rows; many rows through tiles of decoded weights (see ``tiles``). A
stack comes as a vector of integers (``FUNCTION`` and following): addresses, shape and strides. Offsets are
64-bit. Nothing here checks shapes: the gate has.
"""

from __future__ import annotations

import math
import os

import numpy as np
from numba import get_num_threads, njit, prange, set_num_threads

from mlx_experts.engine.kernels.cpu.numba_forms import (
    both_forms,
    call_activation,
    call_decode,
    call_dot,
    call_quantise,
    call_rows,
    kept_on_disk,
    read,
)

(
    FUNCTION,  # compiled product of rows
    WEIGHT,
    SCALES,
    BIASES,  # 0 when the format has none
    BIAS,  # float32 [E, rows], or 0
    SCALE_OF_ALL,  # nvfp4's global scale, float32 [E], or 0
    PLANE_SCALES,  # float32 [P]
    ROWS,
    BLOCKS,  # blocks a row (n)
    WEIGHTS,  # weights a block (P)
    ROW_BYTES,
    SCALE_BYTES,  # bytes of scales, and of biases, a row
    DECODE,  # compiled decoder of rows, or 0 where rows are float32 as the products read them
    PADDED,  # floats of a decoded row
    SPLIT,  # compiled split of an input for the matrix unit, or 0 where the unit does not take the stack
    UNIT,  # compiled product on the matrix unit
    STEPS,  # steps of a row there
    INPUT,  # bytes of an input there
    SUMMED,  # float32 numbers that are kept of an input there
    SCRATCH,  # bytes of room that a product there needs
    QUANTISE,  # compiled rounding of an input for the product of rows, or 0 where inputs are float32
) = range(21)

# One task's rows of gate and up; whole blocks of down (at most 32 weights), so that tasks share none.
ROWS_AT_ONCE = 64
OUTPUTS_AT_ONCE = 32  # one task's rows of down
LINE = 16  # floats of a cache line
TILE, LOW_TILE = 16, 4  # rows of weights that are decoded at once; few while they serve few inputs
LOW_UP_TO = 12  # inputs
DEPTH = 1024  # floats of a row that are multiplied at once, so that six inputs stay in the nearest cache
NVFP4_LARGEST = 6 * 448  # what decoded weights are divided by beside their global scale
FEW = 3  # inputs up to which reading packed rows again costs less than decoding them


@njit
def _room(rows, columns):  # type: ignore[no-untyped-def]
    """A matrix of zeros that begins at a cache line: a vector that straddles two costs twice."""
    room = np.zeros(rows * columns + LINE, np.float32)
    skip = -(np.int64(room.ctypes.data) // 4) % LINE
    return room[skip : skip + rows * columns].reshape(rows, columns)


@njit(error_model="numpy", nogil=True)
def _factor(stack, expert):  # type: ignore[no-untyped-def]
    """What the products of an expert with a global scale are multiplied by."""
    return read(stack[SCALE_OF_ALL], expert) / np.float32(NVFP4_LARGEST)


@njit(error_model="numpy", nogil=True)
def _rows(stack, expert, first, count, x, sums, out):  # type: ignore[no-untyped-def]
    """``count`` rows of one expert times the input, with its factor and its biases, into ``out``."""
    at = expert * stack[ROWS] + first
    scales = at * stack[SCALE_BYTES]
    call_rows(
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
    if stack[SCALE_OF_ALL] != 0:
        for row in range(count):
            out[row] *= _factor(stack, expert)
    if stack[BIAS] != 0:
        for row in range(count):
            out[row] += read(stack[BIAS], at + row)


@njit(error_model="numpy", nogil=True)
def _lay_out(stack, values, first, count, planes, sums):  # type: ignore[no-untyped-def]
    """Put inputs ``first`` and following, whole blocks of them, where the product of rows wants them."""
    if stack[QUANTISE] != 0:
        into, beside = planes.ctypes.data, sums.ctypes.data
        call_quantise(stack[QUANTISE], values.ctypes.data, first, count, into, beside, stack[BLOCKS])
        return
    size = stack[WEIGHTS]
    for i in range(count // size):
        block = first // size + i
        total = np.float32(0)
        for position in range(size):
            value = values[i * size + position]
            planes[position * stack[BLOCKS] + block] = value * read(stack[PLANE_SCALES], position)
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
    x_up, up_sums = _room(1, h)[0], np.empty(2 * up[BLOCKS], np.float32)
    _lay_out(up, x, 0, h, x_up, up_sums)
    x_gate, gate_sums = _room(1, h)[0], np.empty(2 * gate[BLOCKS], np.float32)
    if gated:
        _lay_out(gate, x, 0, h, x_gate, gate_sums)

    tasks = (f + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    hidden = _room(top_k, f)
    hidden_sums = np.empty((top_k, 2 * down[BLOCKS]), np.float32)
    for task in prange(top_k * tasks):
        k, first = task // tasks, task % tasks * ROWS_AT_ONCE
        count = min(ROWS_AT_ONCE, f - first)
        u, g = np.empty(ROWS_AT_ONCE, np.float32), np.empty(ROWS_AT_ONCE, np.float32)
        _rows(up, indices[k], first, count, x_up, up_sums, u)
        if gated:
            _rows(gate, indices[k], first, count, x_gate, gate_sums, g)
        for row in range(count):
            u[row] = call_activation(act, g[row] if gated else u[row], u[row], alpha, limit)
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


@njit(error_model="numpy", nogil=True)
def _spread(stack, values, row):  # type: ignore[no-untyped-def]
    """Put an input in the order of decoded rows, and zeros behind it."""
    size, blocks = stack[WEIGHTS], stack[BLOCKS]
    for i in range(blocks):
        for position in range(size):
            row[position * blocks + i] = values[i * size + position]
    for i in range(size * blocks, row.size):
        row[i] = 0


@njit
def _height(inputs):  # type: ignore[no-untyped-def]
    """Rows of a tile for this number of inputs."""
    return LOW_TILE if inputs <= LOW_UP_TO else TILE


@njit
def _addresses(matrix):  # type: ignore[no-untyped-def]
    """Where each row of a matrix lies; whoever asks keeps the matrix."""
    return np.int64(matrix.ctypes.data) + np.arange(matrix.shape[0]) * (matrix.shape[1] * matrix.itemsize)


@njit(error_model="numpy", nogil=True)
def _tile(stack, dot, expert, first, count, scratch, inputs, outputs, column):  # type: ignore[no-untyped-def]
    """``count`` rows of one matrix times several inputs, to ``column`` and following of each one's output.

    ``inputs`` and ``outputs`` are addresses of rows; factors and biases are left out.
    """
    at = expert * stack[ROWS] + first
    weights, stride = stack[WEIGHT] + at * stack[ROW_BYTES], stack[ROW_BYTES]
    if stack[DECODE] != 0:
        scales = at * stack[SCALE_BYTES]
        stride = stack[PADDED] * 4
        call_decode(
            stack[DECODE],
            weights,
            stack[SCALES] + scales,
            stack[BIASES] + scales,
            stack[ROW_BYTES],
            stack[SCALE_BYTES],
            count,
            stack[BLOCKS],
            scratch.ctypes.data,
            stride,
        )
        weights = scratch.ctypes.data
    for offset in range(0, stack[PADDED], DEPTH):
        length = min(DEPTH, stack[PADDED] - offset)
        call_dot(
            dot,
            weights,
            stride,
            count,
            inputs.ctypes.data,
            outputs.ctypes.data,
            inputs.size,
            offset,
            length,
            column,
            offset,
        )


@njit(error_model="numpy", nogil=True)
def _completed(stack, expert, row, value):  # type: ignore[no-untyped-def]
    """A product of one row with the factor and the bias that its matrix has."""
    if stack[SCALE_OF_ALL] != 0:
        value *= _factor(stack, expert)
    if stack[BIAS] != 0:
        value += read(stack[BIAS], expert * stack[ROWS] + row)
    return value


def _linear(stack, dot, parts, x, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` [R, N] with the products of one matrix with the rows of ``x`` [R, M]."""
    count, width, rows = x.shape[0], x.shape[1], stack[ROWS]
    if count <= FEW:
        planes = _room(count, width)
        sums = np.empty((count, 2 * stack[BLOCKS]), np.float32)
        for r in range(count):
            _lay_out(stack, x[r], 0, width, planes[r], sums[r])
        for task in prange((rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE):
            first = task * ROWS_AT_ONCE
            some = min(ROWS_AT_ONCE, rows - first)
            for r in range(count):
                _rows(stack, 0, first, some, planes[r], sums[r], out[r, first : first + some])
        return
    padded = stack[PADDED]
    spread = _room(count, padded)
    for r in range(count):
        _spread(stack, x[r], spread[r])
    height = _height(count)
    tiles = (rows + height - 1) // height
    parts = min(tiles, parts)
    for part in prange(parts):
        scratch = _room(height, padded)
        inputs, outputs = _addresses(spread), _addresses(out)
        for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
            first = tile * height
            some = min(height, rows - first)
            _tile(stack, dot, 0, first, some, scratch, inputs, outputs, first)
            for r in range(count):
                for i in range(first, first + some):
                    out[r, i] = _completed(stack, 0, i, out[r, i])


def _run_many(  # type: ignore[no-untyped-def]
    gated, gate, up, down, act, alpha, limit, num_experts, dot, parts, turn, some_left, x, indices, weights,
    out
):  # fmt: skip
    """Add to ``out`` [T, H] for T tokens; returns -1, or the position of the first index that is no expert.

    The pairs of a token and an expert are ordered by expert. Each part of the work takes its share of the
    rows of every matrix in use, so that all threads have as much to do however the tokens are spread over the
    experts, and adds to an output in the order of ``turn``, which names the experts of this call. With
    ``some_left`` an index of -1 is a pair of another call.
    """
    tokens, top_k = indices.shape
    h, f = x.shape[1], up[ROWS]
    flat = indices.reshape(indices.size)
    begins = np.zeros(num_experts + 1, np.int64)
    pairs = 0
    for pair in range(flat.size):
        if some_left and flat[pair] == -1:
            continue
        if flat[pair] < 0 or flat[pair] >= num_experts:
            return pair
        begins[flat[pair] + 1] += 1
        pairs += 1
    most = 0
    for e in range(num_experts):
        most = max(most, begins[e + 1])
        begins[e + 1] += begins[e]
    order, filled = np.empty(pairs, np.int64), begins.copy()
    for pair in range(flat.size):
        if flat[pair] >= 0:
            order[filled[flat[pair]]] = pair
            filled[flat[pair]] += 1

    planes_up, sums_up = _room(tokens, h), np.empty((tokens, 2 * up[BLOCKS]), np.float32)
    planes_gate, sums_gate = _room(tokens, h), np.empty((tokens, 2 * gate[BLOCKS]), np.float32)
    spread_up = _room(tokens, up[PADDED])
    spread_gate = _room(tokens, gate[PADDED])
    for t in range(tokens):
        _lay_out(up, x[t], 0, h, planes_up[t], sums_up[t])
        _spread(up, x[t], spread_up[t])
        if gated:
            _lay_out(gate, x[t], 0, h, planes_gate[t], sums_gate[t])
            _spread(gate, x[t], spread_gate[t])

    hidden = _room(pairs, down[PADDED])
    hidden_sums = np.empty((pairs, 2 * down[BLOCKS]), np.float32)
    step = ROWS_AT_ONCE  # whole blocks of down, so that tasks share none
    tasks = (f + step - 1) // step
    shares = min(tasks, parts)
    for part in prange(shares):
        scratch = _room(TILE, max(up[PADDED], gate[PADDED]))
        u, g = np.empty((most, step), np.float32), np.empty((most, step), np.float32)
        to_u, to_g = _addresses(u), _addresses(g)
        from_up, from_gate = _addresses(spread_up)[order // top_k], _addresses(spread_gate)[order // top_k]
        for e in turn:
            begin, number = begins[e], begins[e + 1] - begins[e]
            if number == 0:
                continue
            for task in range(tasks * part // shares, tasks * (part + 1) // shares):
                first = task * step
                count = min(step, f - first)
                if number <= FEW:
                    for r in range(number):
                        token = order[begin + r] // top_k
                        _rows(up, e, first, count, planes_up[token], sums_up[token], u[r])
                        if gated:
                            _rows(gate, e, first, count, planes_gate[token], sums_gate[token], g[r])
                else:
                    end, height = begin + number, _height(number)
                    for row in range(0, count, height):
                        some, at = min(height, count - row), first + row
                        _tile(up, dot, e, at, some, scratch, from_up[begin:end], to_u, row)
                        if gated:
                            _tile(gate, dot, e, at, some, scratch, from_gate[begin:end], to_g, row)
                    for r in range(number):
                        for row in range(count):
                            u[r, row] = _completed(up, e, first + row, u[r, row])
                            if gated:
                                g[r, row] = _completed(gate, e, first + row, g[r, row])
                for r in range(number):
                    for row in range(count):
                        value = u[r, row]
                        u[r, row] = call_activation(act, g[r, row] if gated else value, value, alpha, limit)
                    if number <= FEW:
                        _lay_out(down, u[r], first, count, hidden[begin + r], hidden_sums[begin + r])
                    else:
                        for row in range(count):
                            block, position = (first + row) // down[WEIGHTS], (first + row) % down[WEIGHTS]
                            hidden[begin + r, position * down[BLOCKS] + block] = u[r, row]

    tiles = (h + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    shares = min(tiles, parts)
    for part in prange(shares):
        scratch = _room(TILE, down[PADDED])
        y = np.empty((most, ROWS_AT_ONCE), np.float32)
        to_y, from_hidden = _addresses(y), _addresses(hidden)
        for e in turn:
            begin, end = begins[e], begins[e + 1]
            number = end - begin
            if number == 0:
                continue
            for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
                first = tile * ROWS_AT_ONCE
                count = min(ROWS_AT_ONCE, h - first)
                if number <= FEW:
                    for r in range(number):
                        _rows(down, e, first, count, hidden[begin + r], hidden_sums[begin + r], y[r])
                else:
                    height = _height(number)
                    for row in range(0, count, height):
                        some, at = min(height, count - row), first + row
                        _tile(down, dot, e, at, some, scratch, from_hidden[begin:end], to_y, row)
                for r in range(number):
                    pair = order[begin + r]
                    token, share = pair // top_k, weights[pair // top_k, pair % top_k]
                    for row in range(count):
                        value = y[r, row] if number <= FEW else _completed(down, e, first + row, y[r, row])
                        out[token, first + row] += share * value
    return -1


def use_threads(count: int) -> None:
    """How many threads the parallel forms use from now on, where this thread calls them."""
    set_num_threads(count)


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


one_token = both_forms(_run)
many_tokens = both_forms(_run_many)
linear = both_forms(_linear)


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


route = kept_on_disk(_route, nogil=True, error_model="numpy")
