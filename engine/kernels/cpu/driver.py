"""What numba compiles of the matrices' computation on the CPU, for all formats at once: its order.

One row goes through products of packed rows; many rows through tiles of decoded weights (see ``tiles``). A
stack comes as a vector of integers (``FUNCTION`` and following): addresses, shape and strides. Offsets are
64-bit. Nothing here checks shapes: the gate has.

Arrays are addresses of what lies in memory row after row, float32 unless said otherwise: numba takes a
multiple of the time to compile what is done to its own arrays.
"""

from __future__ import annotations

import os

import numpy as np
from numba import get_num_threads, njit, prange, set_num_threads

from mlx_experts.engine.kernels.cpu.intrinsics import (
    address,
    as_float,
    call_activation,
    call_decode,
    call_dot,
    call_loop,
    call_quantise,
    call_rows,
    number,
    packed,
    read,
    release,
    room,
    store,
    unpacked,
    whole32,
    write,
    zeros,
)
from mlx_experts.engine.kernels.cpu.numba_forms import Forms, Part

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
TILE, LOW_TILE = 16, 4  # rows of weights that are decoded at once; few while they serve few inputs
LOW_UP_TO = 12  # inputs
DEPTH = 1024  # floats of a row that are multiplied at once, so that six inputs stay in the nearest cache
NVFP4_LARGEST = 6 * 448  # what decoded weights are divided by beside their global scale
FEW = 3  # inputs up to which reading packed rows again costs less than decoding them


@njit(error_model="numpy")
def _factor(stack, expert):  # type: ignore[no-untyped-def]
    """What the products of an expert with a global scale are multiplied by."""
    return read(number(stack, SCALE_OF_ALL), expert) / np.float32(NVFP4_LARGEST)


@njit(error_model="numpy")
def expert_rows(stack, expert, first, count, x, sums, out):  # type: ignore[no-untyped-def]
    """``count`` rows of one expert times the input, with its factor and its biases, into ``out``."""
    at = expert * number(stack, ROWS) + first
    scales = at * number(stack, SCALE_BYTES)
    call_rows(
        number(stack, FUNCTION),
        number(stack, WEIGHT) + at * number(stack, ROW_BYTES),
        number(stack, SCALES) + scales,
        number(stack, BIASES) + scales,
        number(stack, ROW_BYTES),
        number(stack, SCALE_BYTES),
        count,
        x,
        sums,
        number(stack, BLOCKS),
        out,
    )
    if number(stack, SCALE_OF_ALL) != 0:
        for row in range(count):
            write(out, row, read(out, row) * _factor(stack, expert))
    if number(stack, BIAS) != 0:
        for row in range(count):
            write(out, row, read(out, row) + read(number(stack, BIAS), at + row))


@njit(error_model="numpy")
def lay_out(stack, values, first, count, planes, sums):  # type: ignore[no-untyped-def]
    """Put inputs ``first`` and following, whole blocks of them, where the product of rows wants them."""
    size, blocks = number(stack, WEIGHTS), number(stack, BLOCKS)
    if number(stack, QUANTISE) != 0:
        call_quantise(number(stack, QUANTISE), values, first, count, planes, sums, blocks)
        return
    for i in range(count // size):
        block = first // size + i
        total = np.float32(0)
        for position in range(size):
            value = read(values, i * size + position)
            scale = read(number(stack, PLANE_SCALES), position)
            write(planes, position * blocks + block, value * scale)
            total += value
        write(sums, block, total)


def _hidden_task(task, context):  # type: ignore[no-untyped-def]
    """Some hidden values of one expert, laid out for its down projection."""
    (
        gated, gate, up, down, act, alpha, limit, tasks, indices, x_up, up_sums, x_gate, gate_sums, hidden,
        hidden_sums,
    ) = unpacked(context, 15)  # fmt: skip
    f = number(up, ROWS)
    k, first = task // tasks, task % tasks * ROWS_AT_ONCE
    count, expert = min(ROWS_AT_ONCE, f - first), whole32(indices, k)
    u, g = room(ROWS_AT_ONCE * 4), room(ROWS_AT_ONCE * 4)
    expert_rows(up, expert, first, count, x_up, up_sums, u)
    if gated != 0:
        expert_rows(gate, expert, first, count, x_gate, gate_sums, g)
    for row in range(count):
        value = read(u, row)
        other = read(g, row) if gated != 0 else value
        write(u, row, call_activation(act, other, value, as_float(alpha), as_float(limit)))
    lay_out(down, u, first, count, hidden + k * f * 4, hidden_sums + k * 8 * number(down, BLOCKS))
    release(u, g)


def _output_task(task, context):  # type: ignore[no-untyped-def]
    """Some outputs of one token: the weighted sum over its experts."""
    down, f, h, top_k, indices, weights, hidden, hidden_sums, out, at_once = unpacked(context, 10)
    first = task * at_once
    count = min(at_once, h - first)
    part, total = room(at_once * 4), zeros(at_once * 4)
    for k in range(top_k):
        sums = hidden_sums + k * 8 * number(down, BLOCKS)
        expert_rows(down, whole32(indices, k), first, count, hidden + k * f * 4, sums, part)
        for row in range(count):
            write(total, row, read(total, row) + read(weights, k) * read(part, row))
    for row in range(count):
        write(out, first + row, read(total, row))
    release(part, total)


@njit(error_model="numpy")
def _spread(stack, values, row):  # type: ignore[no-untyped-def]
    """Put an input in the order of decoded rows, and zeros behind it."""
    size, blocks = number(stack, WEIGHTS), number(stack, BLOCKS)
    for i in range(blocks):
        for position in range(size):
            write(row, position * blocks + i, read(values, i * size + position))
    for i in range(size * blocks, number(stack, PADDED)):
        write(row, i, np.float32(0))


@njit(error_model="numpy")
def _height(inputs):  # type: ignore[no-untyped-def]
    """Rows of a tile for this number of inputs."""
    return LOW_TILE if inputs <= LOW_UP_TO else TILE


@njit(error_model="numpy")
def _tile(  # type: ignore[no-untyped-def]
    stack, dot, expert, first, count, scratch, inputs, outputs, number_of, column
):
    """``count`` rows of one matrix times several inputs, to ``column`` and following of each one's output.

    ``inputs`` and ``outputs`` are lists of addresses of rows; factors and biases are left out.
    """
    at = expert * number(stack, ROWS) + first
    weights, stride = number(stack, WEIGHT) + at * number(stack, ROW_BYTES), number(stack, ROW_BYTES)
    padded = number(stack, PADDED)
    if number(stack, DECODE) != 0:
        scales = at * number(stack, SCALE_BYTES)
        stride = padded * 4
        call_decode(
            number(stack, DECODE),
            weights,
            number(stack, SCALES) + scales,
            number(stack, BIASES) + scales,
            number(stack, ROW_BYTES),
            number(stack, SCALE_BYTES),
            count,
            number(stack, BLOCKS),
            scratch,
            stride,
        )
        weights = scratch
    for offset in range(0, padded, DEPTH):
        length = min(DEPTH, padded - offset)
        call_dot(dot, weights, stride, count, inputs, outputs, number_of, offset, length, column, offset)


@njit(error_model="numpy")
def _completed(stack, expert, row, value):  # type: ignore[no-untyped-def]
    """A product of one row with the factor and the bias that its matrix has."""
    if number(stack, SCALE_OF_ALL) != 0:
        value *= _factor(stack, expert)
    if number(stack, BIAS) != 0:
        value += read(number(stack, BIAS), expert * number(stack, ROWS) + row)
    return value


def _many_inputs(part, context):  # type: ignore[no-untyped-def]
    """One share of a matrix's rows times many inputs, by tiles."""
    stack, dot, shares, count, height, inputs, outputs, out = unpacked(context, 8)
    rows = number(stack, ROWS)
    tiles = (rows + height - 1) // height
    scratch = zeros(height * number(stack, PADDED) * 4)
    for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
        first = tile * height
        some = min(height, rows - first)
        _tile(stack, dot, 0, first, some, scratch, inputs, outputs, count, first)
        for r in range(count):
            for i in range(first, first + some):
                write(out, r * rows + i, _completed(stack, 0, i, read(out, r * rows + i)))
    release(scratch)


def _linear(loop, many_inputs, stack_, dot, parts, x, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` [R, N] with the products of one matrix with the rows of ``x`` [R, M], by tiles."""
    stack, from_x, to_out = address(stack_), address(x), address(out)
    count, width, rows = x.shape[0], x.shape[1], number(stack, ROWS)
    each = number(stack, PADDED) * 4
    spread, inputs, outputs = room(count * each), room(count * 8), room(count * 8)
    for r in range(count):
        _spread(stack, from_x + r * width * 4, spread + r * each)
        store(inputs, r, spread + r * each)
        store(outputs, r, to_out + r * rows * 4)
    height = _height(count)
    shares = min((rows + height - 1) // height, parts)
    context = packed(stack, dot, shares, count, height, inputs, outputs, to_out)
    call_loop(loop, many_inputs, shares, context)
    release(spread, inputs, outputs)


def _hidden_share(part, context):  # type: ignore[no-untyped-def]
    """One share of the hidden values' rows, for all experts in use."""
    (
        gated, gate, up, down, act, alpha, limit, dot, shares, turn, turns, top_k, h, most, begins, order,
        planes_up, sums_up, planes_gate, sums_gate, from_up, from_gate, hidden, hidden_sums,
    ) = unpacked(context, 24)  # fmt: skip
    f, step = number(up, ROWS), ROWS_AT_ONCE  # whole blocks of down, so that tasks share none
    tasks, size, blocks = (f + step - 1) // step, number(down, WEIGHTS), number(down, BLOCKS)
    scratch = zeros(TILE * max(number(up, PADDED), number(gate, PADDED)) * 4)
    u, g, to_u, to_g = room(most * step * 4), room(most * step * 4), room(most * 8), room(most * 8)
    for r in range(most):
        store(to_u, r, u + r * step * 4)
        store(to_g, r, g + r * step * 4)
    for t in range(turns):
        e = number(turn, t)
        begin, inputs = number(begins, e), number(begins, e + 1) - number(begins, e)
        if inputs == 0:
            continue
        for task in range(tasks * part // shares, tasks * (part + 1) // shares):
            first = task * step
            count = min(step, f - first)
            if inputs <= FEW:
                for r in range(inputs):
                    token = number(order, begin + r) // top_k
                    x, sums = planes_up + token * h * 4, sums_up + token * 8 * number(up, BLOCKS)
                    expert_rows(up, e, first, count, x, sums, number(to_u, r))
                    if gated != 0:
                        x, sums = planes_gate + token * h * 4, sums_gate + token * 8 * number(gate, BLOCKS)
                        expert_rows(gate, e, first, count, x, sums, number(to_g, r))
            else:
                height = _height(inputs)
                for row in range(0, count, height):
                    some, at = min(height, count - row), first + row
                    _tile(up, dot, e, at, some, scratch, from_up + begin * 8, to_u, inputs, row)
                    if gated != 0:
                        _tile(gate, dot, e, at, some, scratch, from_gate + begin * 8, to_g, inputs, row)
                for r in range(inputs):
                    own_u, own_g = number(to_u, r), number(to_g, r)
                    for row in range(count):
                        write(own_u, row, _completed(up, e, first + row, read(own_u, row)))
                        if gated != 0:
                            write(own_g, row, _completed(gate, e, first + row, read(own_g, row)))
            for r in range(inputs):
                own_u, own_g = number(to_u, r), number(to_g, r)
                into = hidden + (begin + r) * number(down, PADDED) * 4
                for row in range(count):
                    value = read(own_u, row)
                    other = read(own_g, row) if gated != 0 else value
                    write(own_u, row, call_activation(act, other, value, as_float(alpha), as_float(limit)))
                if inputs <= FEW:
                    lay_out(down, own_u, first, count, into, hidden_sums + (begin + r) * 8 * blocks)
                else:
                    for row in range(count):
                        block, position = (first + row) // size, (first + row) % size
                        write(into, position * blocks + block, read(own_u, row))
    release(scratch, u, g, to_u, to_g)


def _output_share(part, context):  # type: ignore[no-untyped-def]
    """One share of the outputs' columns, for all experts in use in their turn."""
    (
        down, dot, shares, turn, turns, top_k, h, most, begins, order, hidden, hidden_sums, from_hidden,
        weights, out,
    ) = unpacked(context, 15)  # fmt: skip
    step, padded, blocks = ROWS_AT_ONCE, number(down, PADDED), number(down, BLOCKS)
    tiles = (h + step - 1) // step
    scratch, y, to_y = zeros(TILE * padded * 4), room(most * step * 4), room(most * 8)
    for r in range(most):
        store(to_y, r, y + r * step * 4)
    for t in range(turns):
        e = number(turn, t)
        begin, inputs = number(begins, e), number(begins, e + 1) - number(begins, e)
        if inputs == 0:
            continue
        for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
            first = tile * step
            count = min(step, h - first)
            if inputs <= FEW:
                for r in range(begin, begin + inputs):
                    sums = hidden_sums + r * 8 * blocks
                    expert_rows(down, e, first, count, hidden + r * padded * 4, sums, number(to_y, r - begin))
            else:
                height = _height(inputs)
                for row in range(0, count, height):
                    some, at = min(height, count - row), first + row
                    _tile(down, dot, e, at, some, scratch, from_hidden + begin * 8, to_y, inputs, row)
            for r in range(inputs):
                pair, own = number(order, begin + r), number(to_y, r)
                share, into = read(weights, pair), out + (pair // top_k * h + first) * 4
                for row in range(count):
                    value = read(own, row)
                    if inputs > FEW:
                        value = _completed(down, e, first + row, value)
                    write(into, row, read(into, row) + share * value)
    release(scratch, y, to_y)


@njit(error_model="numpy")
def _counted(indices, pairs, experts, some_left, begins):  # type: ignore[no-untyped-def]
    """Where each expert's pairs begin among all, in ``begins``.

    Returns the most pairs of an expert, or -1 minus the position of the first index that is no expert.
    """
    for pair in range(pairs):
        e = whole32(indices, pair)
        if some_left and e == -1:
            continue
        if e < 0 or e >= experts:
            return -1 - pair
        store(begins, e + 1, number(begins, e + 1) + 1)
    most = 0
    for e in range(experts):
        most = max(most, number(begins, e + 1))
        store(begins, e + 1, number(begins, e + 1) + number(begins, e))
    return most


def _run_many(  # type: ignore[no-untyped-def]
    loop, hidden_share, output_share, gated, gate_, up_, down_, act, alpha, limit, num_experts, dot, parts,
    turn, some_left, x_, indices_, weights, out
):  # fmt: skip
    """Add to ``out`` [T, H] for T tokens; returns -1, or the position of the first index that is no expert.

    The pairs of a token and an expert are ordered by expert. Each part of the work takes its share of the
    rows of every matrix in use, so that all threads have as much to do however the tokens are spread over the
    experts, and adds to an output in the order of ``turn``, which names the experts of this call. With
    ``some_left`` an index of -1 is a pair of another call.
    """
    gate, up, down, indices = address(gate_), address(up_), address(down_), address(indices_)
    tokens, top_k = indices_.shape
    h, f = x_.shape[1], number(up, ROWS)
    begins = zeros((num_experts + 1) * 8)
    most = _counted(indices, tokens * top_k, num_experts, some_left, begins)
    if most < 0:
        release(begins)
        return -1 - most
    pairs = number(begins, num_experts)
    planes_up, sums_up = zeros(tokens * h * 4), room(tokens * 8 * number(up, BLOCKS))
    planes_gate, sums_gate = zeros(tokens * h * 4), room(tokens * 8 * number(gate, BLOCKS))
    each_up, each_gate, each = number(up, PADDED) * 4, number(gate, PADDED) * 4, number(down, PADDED) * 4
    spread_up, spread_gate = room(tokens * each_up), room(tokens * each_gate)
    for t in range(tokens):
        x = address(x_) + t * h * 4
        lay_out(up, x, 0, h, planes_up + t * h * 4, sums_up + t * 8 * number(up, BLOCKS))
        _spread(up, x, spread_up + t * each_up)
        if gated:
            lay_out(gate, x, 0, h, planes_gate + t * h * 4, sums_gate + t * 8 * number(gate, BLOCKS))
            _spread(gate, x, spread_gate + t * each_gate)

    hidden, hidden_sums = zeros(pairs * each), room(pairs * 8 * number(down, BLOCKS))
    order, filled = room(pairs * 8), zeros(num_experts * 8)
    from_up, from_gate, from_hidden = room(pairs * 8), room(pairs * 8), room(pairs * 8)
    for pair in range(tokens * top_k):
        e = whole32(indices, pair)
        if e >= 0:
            row, token = number(begins, e) + number(filled, e), pair // top_k
            store(filled, e, number(filled, e) + 1)
            store(order, row, pair)
            store(from_up, row, spread_up + token * each_up)
            store(from_gate, row, spread_gate + token * each_gate)
            store(from_hidden, row, hidden + row * each)

    shares = min((f + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, parts)
    context = packed(
        gated, gate, up, down, act, alpha, limit, dot, shares, address(turn), turn.size, top_k, h, most,
        begins, order, planes_up, sums_up, planes_gate, sums_gate, from_up, from_gate, hidden, hidden_sums,
    )  # fmt: skip
    call_loop(loop, hidden_share, shares, context)
    shares = min((h + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, parts)
    context = packed(
        down, dot, shares, address(turn), turn.size, top_k, h, most, begins, order, hidden, hidden_sums,
        from_hidden, address(weights), address(out),
    )  # fmt: skip
    call_loop(loop, output_share, shares, context)
    release(planes_up, sums_up, planes_gate, sums_gate, spread_up, spread_gate)
    release(begins, hidden, hidden_sums, order, filled, from_up, from_gate, from_hidden)
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


HIDDEN, OUTPUT = Part(_hidden_task), Part(_output_task)
"""One token's experts in two steps; see ``steps``."""
many_tokens = Forms(_run_many, _hidden_share, _output_share)
linear = Forms(_linear, _many_inputs)


@njit(parallel=True, cache=False)
def checksum(numbers):  # type: ignore[no-untyped-def]
    """The sum of an array, as fast as the machine can read it: what bandwidth is measured with."""
    total = np.uint64(0)
    for i in prange(numbers.size):
        total += numbers[i]
    return total
