"""What numba compiles for a processor's matrix unit: linear layers and experts of many rows.

``amx`` has the machine code. An input is split into its parts once for each expert that it goes to; a product
decodes some rows of weights once for all of an expert's inputs.
"""

from __future__ import annotations

from numba import njit

from mlx_experts.engine.kernels.cpu.driver import (
    BIAS,
    BIASES,
    INPUT,
    ROW_BYTES,
    ROWS,
    SCALE_BYTES,
    SCALE_OF_ALL,
    SCALES,
    SCRATCH,
    SPLIT,
    STEPS,
    SUMMED,
    UNIT,
    WEIGHT,
    _factor,
)
from mlx_experts.engine.kernels.cpu.intrinsics import (
    address,
    as_float,
    call_activation,
    call_loop,
    call_split,
    call_unit,
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
from mlx_experts.engine.kernels.cpu.numba_forms import Forms
from mlx_experts.engine.kernels.cpu.products.amx import ROWS as HEIGHT
from mlx_experts.engine.kernels.cpu.products.amx import TOKENS

CACHE = 1 << 20  # bytes of inputs that are kept near a core


@njit(error_model="numpy")
def _block(inputs):  # type: ignore[no-untyped-def]
    """How many blocks of the matrix unit take some inputs, and the inputs of each, the last one's padded."""
    blocks = (inputs + TOKENS - 1) // TOKENS
    return blocks, (inputs + blocks - 1) // blocks


@njit(error_model="numpy")
def _split(stack, x, parts, row, inside, size, sums):  # type: ignore[no-untyped-def]
    """Put an input into ``parts`` as its ``row``, which is the ``inside``-th of a block of ``size``."""
    at = parts + (row - inside) * number(stack, INPUT) + inside * 64
    into = sums + row * number(stack, SUMMED) * 4
    call_split(number(stack, SPLIT), x, number(stack, STEPS), size, at, into)


@njit(error_model="numpy")
def _on_unit(  # type: ignore[no-untyped-def]
    stack, configs, expert, first, count, parts, sums, row, blocks, tokens, scratch, out
):
    """``count`` rows of one matrix times some blocks of inputs, from ``row`` on, to ``out`` [R, HEIGHT]."""
    at = expert * number(stack, ROWS) + first
    scales = at * number(stack, SCALE_BYTES)
    call_unit(
        number(stack, UNIT),
        number(stack, WEIGHT) + at * number(stack, ROW_BYTES),
        number(stack, SCALES) + scales,
        number(stack, BIASES) + scales,
        number(stack, ROW_BYTES),
        number(stack, SCALE_BYTES),
        count,
        parts + row * number(stack, INPUT),
        sums + row * number(stack, SUMMED) * 4,
        blocks,
        tokens,
        configs,
        out,
        scratch,
    )


@njit(error_model="numpy")
def _complete(stack, expert, first, count, values):  # type: ignore[no-untyped-def]
    """Products of one matrix with the factor and the biases that it has, from row ``first`` on, in place."""
    if number(stack, SCALE_OF_ALL) != 0:
        for i in range(count):
            write(values, i, read(values, i) * _factor(stack, expert))
    if number(stack, BIAS) != 0:
        at = expert * number(stack, ROWS) + first
        for i in range(count):
            write(values, i, read(values, i) + read(number(stack, BIAS), at + i))


def _split_input(r, context):  # type: ignore[no-untyped-def]
    """The parts of one row of a linear layer's input, or of zeros behind the last."""
    stack, x, width, count, tokens, parts, sums, nothing = unpacked(context, 8)
    _split(stack, x + r * width * 4 if r < count else nothing, parts, r, r % tokens, tokens, sums)


def _linear_share(part, context):  # type: ignore[no-untyped-def]
    """One share of a linear layer's rows, for all inputs."""
    stack, configs, shares, count, tokens, blocks, parts, sums, out = unpacked(context, 9)
    rows = number(stack, ROWS)
    # As many blocks at once as a core's own cache holds.
    slab = max(min(CACHE // (tokens * number(stack, INPUT)), blocks), 1)
    tiles = (rows + HEIGHT - 1) // HEIGHT
    scratch, made = room(number(stack, SCRATCH)), room(slab * tokens * HEIGHT * 4)
    for block in range(0, blocks, slab):
        some, row = min(slab, blocks - block), block * tokens
        for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
            first = tile * HEIGHT
            height = min(HEIGHT, rows - first)
            _on_unit(stack, configs, 0, first, height, parts, sums, row, some, tokens, scratch, made)
            for r in range(min(some * tokens, count - row)):
                values = made + r * HEIGHT * 4
                _complete(stack, 0, first, height, values)
                for i in range(height):
                    write(out, (row + r) * rows + first + i, read(values, i))
    release(scratch, made)


def _linear_on_unit(  # type: ignore[no-untyped-def]
    loop, split_input, linear_share, stack, configs, parts, x, out
):
    """Fill ``out`` [R, N] with the products of one matrix with the rows of ``x`` [R, M]."""
    count, width, plan = x.shape[0], x.shape[1], address(stack)
    blocks, tokens = _block(count)
    padded = blocks * tokens
    inputs = room(padded * number(plan, INPUT))
    sums, nothing = room(padded * number(plan, SUMMED) * 4), zeros(width * 4)
    context = packed(plan, address(x), width, count, tokens, inputs, sums, nothing)
    call_loop(loop, split_input, padded, context)
    shares = min((number(plan, ROWS) + HEIGHT - 1) // HEIGHT, parts)
    context = packed(plan, configs, shares, count, tokens, blocks, inputs, sums, address(out))
    call_loop(loop, linear_share, shares, context)
    release(inputs, sums, nothing)


def _split_token(row, context):  # type: ignore[no-untyped-def]
    """The parts of one pair's token for gate and up, or of zeros behind an expert's last."""
    (
        gate, up, shared, x, h, top_k, order, expert_of, sizes, padded, parts_up, sums_up, parts_gate,
        sums_gate, nothing,
    ) = unpacked(context, 15)  # fmt: skip
    e, pair = number(expert_of, row), number(order, row)
    size = number(sizes, 2 * e + 1)
    inside = (row - number(padded, e)) % size
    values = x + pair // top_k * h * 4 if pair >= 0 else nothing
    _split(up, values, parts_up, row, inside, size, sums_up)
    if shared == 0:
        _split(gate, values, parts_gate, row, inside, size, sums_gate)


def _hidden_share(part, context):  # type: ignore[no-untyped-def]
    """One share of the hidden values' rows, for all experts in use."""
    (
        gated, gate, up, act, alpha, limit, configs, shares, turn, turns, most, begins, padded, sizes,
        parts_up, sums_up, parts_gate, sums_gate, hidden,
    ) = unpacked(context, 19)  # fmt: skip
    f = number(up, ROWS)
    tiles = (f + HEIGHT - 1) // HEIGHT
    scratch = room(max(number(up, SCRATCH), number(gate, SCRATCH)))
    u, g = room(most * HEIGHT * 4), room(most * HEIGHT * 4)
    for t in range(turns):
        e = number(turn, t)
        begin, inputs = number(padded, e), number(begins, e + 1) - number(begins, e)
        blocks, size = number(sizes, 2 * e), number(sizes, 2 * e + 1)
        if inputs == 0:
            continue
        for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
            first = tile * HEIGHT
            count = min(HEIGHT, f - first)
            _on_unit(up, configs, e, first, count, parts_up, sums_up, begin, blocks, size, scratch, u)
            if gated != 0:
                _on_unit(
                    gate, configs, e, first, count, parts_gate, sums_gate, begin, blocks, size, scratch, g
                )
            for r in range(inputs):
                from_u, from_g = u + r * HEIGHT * 4, g + r * HEIGHT * 4
                _complete(up, e, first, count, from_u)
                if gated != 0:
                    _complete(gate, e, first, count, from_g)
                into = hidden + ((begin + r) * f + first) * 4
                for i in range(count):
                    value = read(from_u, i)
                    other = read(from_g, i) if gated != 0 else value
                    write(into, i, call_activation(act, other, value, as_float(alpha), as_float(limit)))
    release(scratch, u, g)


def _split_hidden(row, context):  # type: ignore[no-untyped-def]
    """The parts of one pair's hidden values."""
    down, f, expert_of, sizes, padded, hidden, parts_down, sums_down = unpacked(context, 8)
    e = number(expert_of, row)
    size = number(sizes, 2 * e + 1)
    inside = (row - number(padded, e)) % size
    _split(down, hidden + row * f * 4, parts_down, row, inside, size, sums_down)


def _output_share(part, context):  # type: ignore[no-untyped-def]
    """One share of the outputs' columns, for all experts in use in their turn."""
    (
        down, configs, shares, turn, turns, most, begins, padded, sizes, parts_down, sums_down, order, top_k,
        weights, out,
    ) = unpacked(context, 15)  # fmt: skip
    h = number(down, ROWS)
    tiles = (h + HEIGHT - 1) // HEIGHT
    scratch, y = room(number(down, SCRATCH)), room(most * HEIGHT * 4)
    for t in range(turns):
        e = number(turn, t)
        begin, inputs = number(padded, e), number(begins, e + 1) - number(begins, e)
        blocks, size = number(sizes, 2 * e), number(sizes, 2 * e + 1)
        if inputs == 0:
            continue
        for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
            first = tile * HEIGHT
            count = min(HEIGHT, h - first)
            _on_unit(down, configs, e, first, count, parts_down, sums_down, begin, blocks, size, scratch, y)
            for r in range(inputs):
                pair, values = number(order, begin + r), y + r * HEIGHT * 4
                share, into = read(weights, pair), out + (pair // top_k * h + first) * 4
                _complete(down, e, first, count, values)
                for i in range(count):
                    write(into, i, read(into, i) + share * read(values, i))
    release(scratch, y)


@njit(error_model="numpy")
def _ordered(indices, pairs, experts, some_left, begins, padded, sizes):  # type: ignore[no-untyped-def]
    """Count each expert's pairs; returns the largest padded count, or -1 minus the position of a wrong index.

    ``begins`` holds where an expert's pairs begin among all, ``sizes`` its blocks and the inputs of each, and
    ``padded`` where its rows begin when each block is padded to one size.
    """
    for pair in range(pairs):
        e = whole32(indices, pair)
        if some_left and e == -1:
            continue
        if e < 0 or e >= experts:
            return -1 - pair
        store(begins, e + 1, number(begins, e + 1) + 1)
    most = 1
    for e in range(experts):
        inputs = number(begins, e + 1)
        blocks, size = _block(max(inputs, 1))
        store(sizes, 2 * e, blocks)
        store(sizes, 2 * e + 1, size)
        room_of = blocks * size if inputs else 0
        most = max(most, room_of)
        store(padded, e + 1, number(padded, e) + room_of)
        store(begins, e + 1, inputs + number(begins, e))
    return most


@njit(error_model="numpy")
def _placed(indices, pairs, experts, padded, filled, order, expert_of):  # type: ignore[no-untyped-def]
    """The pair of each padded row in ``order``, -1 where there is none, and its expert in ``expert_of``."""
    for row in range(number(padded, experts)):
        store(order, row, -1)
    for pair in range(pairs):
        e = whole32(indices, pair)
        if e >= 0:
            store(order, number(padded, e) + number(filled, e), pair)
            store(filled, e, number(filled, e) + 1)
    for e in range(experts):
        for row in range(number(padded, e), number(padded, e + 1)):
            store(expert_of, row, e)


def _experts_on_unit(  # type: ignore[no-untyped-def]
    loop, split_token, hidden_share, split_hidden, output_share, gated, gate_, up_, down_, act, alpha, limit,
    num_experts, configs, parts, turn, some_left, x, indices, weights, out
):  # fmt: skip
    """Add to ``out`` [T, H] for T tokens; returns -1, or the position of the first index that is no expert.

    As ``driver``'s for many tokens: the pairs of a token and an expert are ordered by expert, and each part
    of the work takes its share of the rows of every matrix in use and adds in the order of ``turn``. An
    expert's inputs lie in blocks of one size.
    """
    gate, up, down, chosen = address(gate_), address(up_), address(down_), address(indices)
    top_k, pairs = indices.shape[1], indices.size
    h, f = x.shape[1], number(up, ROWS)
    begins, padded = zeros((num_experts + 1) * 8), zeros((num_experts + 1) * 8)
    sizes, filled = room(num_experts * 16), zeros(num_experts * 8)
    most = _ordered(chosen, pairs, num_experts, some_left, begins, padded, sizes)
    if most > 0:
        total = number(padded, num_experts)
        order, expert_of = room(total * 8), room(total * 8)
        _placed(chosen, pairs, num_experts, padded, filled, order, expert_of)
        shared = not gated or number(up, SPLIT) == number(gate, SPLIT)
        parts_up, sums_up = room(total * number(up, INPUT)), room(total * number(up, SUMMED) * 4)
        parts_gate, sums_gate = parts_up, sums_up
        if not shared:
            parts_gate, sums_gate = room(total * number(gate, INPUT)), room(total * number(gate, SUMMED) * 4)
        hidden, nothing = zeros(total * f * 4), zeros(h * 4)
        context = packed(
            gate, up, shared, address(x), h, top_k, order, expert_of, sizes, padded, parts_up, sums_up,
            parts_gate, sums_gate, nothing,
        )  # fmt: skip
        call_loop(loop, split_token, total, context)
        shares = min((f + HEIGHT - 1) // HEIGHT, parts)
        context = packed(
            gated, gate, up, act, alpha, limit, configs, shares, address(turn), turn.size, most, begins,
            padded, sizes, parts_up, sums_up, parts_gate, sums_gate, hidden,
        )  # fmt: skip
        call_loop(loop, hidden_share, shares, context)

        parts_down, sums_down = room(total * number(down, INPUT)), room(total * number(down, SUMMED) * 4)
        context = packed(down, f, expert_of, sizes, padded, hidden, parts_down, sums_down)
        call_loop(loop, split_hidden, total, context)
        shares = min((h + HEIGHT - 1) // HEIGHT, parts)
        context = packed(
            down, configs, shares, address(turn), turn.size, most, begins, padded, sizes, parts_down,
            sums_down, order, top_k, address(weights), address(out),
        )  # fmt: skip
        call_loop(loop, output_share, shares, context)
        if not shared:
            release(parts_gate, sums_gate)
        release(order, expert_of, parts_up, sums_up, hidden, nothing, parts_down, sums_down)
    release(begins, padded, sizes, filled)
    return -1 if most > 0 else -1 - most


experts_on_unit = Forms(_experts_on_unit, _split_token, _hidden_share, _split_hidden, _output_share)
linear_on_unit = Forms(_linear_on_unit, _split_input, _linear_share)
