"""What numba compiles for a processor's matrix unit: linear layers and experts of many rows.

``amx`` has the machine code. An input is split into its parts once for each expert that it goes to; a product
decodes some rows of weights once for all of an expert's inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

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
from mlx_experts.engine.kernels.cpu.numba_forms import (
    both_forms,
    call_activation,
    call_split,
    call_unit,
    read,
)
from mlx_experts.engine.kernels.cpu.products.amx import ROWS as HEIGHT
from mlx_experts.engine.kernels.cpu.products.amx import TOKENS

CACHE = 1 << 20  # bytes of inputs that are kept near a core


@njit
def _block(inputs):  # type: ignore[no-untyped-def]
    """How many blocks of the matrix unit take some inputs, and the inputs of each, the last one's padded."""
    blocks = (inputs + TOKENS - 1) // TOKENS
    return blocks, (inputs + blocks - 1) // blocks


@njit
def _bytes(size):  # type: ignore[no-untyped-def]
    """Room of bytes that begins at a cache line."""
    room = np.empty(size + 64, np.uint8)
    skip = -np.int64(room.ctypes.data) % 64
    return room[skip : skip + size]


@njit(error_model="numpy", nogil=True)
def _split(stack, x, room, place, row, tokens, sums):  # type: ignore[no-untyped-def]
    """Put one input into ``room``, as the ``row``-th of the block of ``tokens`` that begins at ``place``."""
    at = np.int64(room.ctypes.data) + place + row * 64
    call_split(stack[SPLIT], x.ctypes.data, stack[STEPS], tokens, at, sums.ctypes.data)


@njit(error_model="numpy", nogil=True)
def _on_unit(  # type: ignore[no-untyped-def]
    stack, configs, expert, first, count, room, place, sums, blocks, tokens, scratch, out
):
    """``count`` rows of one matrix times the inputs of some blocks, to ``out`` [inputs, HEIGHT]."""
    at = expert * stack[ROWS] + first
    scales = at * stack[SCALE_BYTES]
    call_unit(
        stack[UNIT],
        stack[WEIGHT] + at * stack[ROW_BYTES],
        stack[SCALES] + scales,
        stack[BIASES] + scales,
        stack[ROW_BYTES],
        stack[SCALE_BYTES],
        count,
        np.int64(room.ctypes.data) + place,
        sums.ctypes.data,
        blocks,
        tokens,
        configs,
        out.ctypes.data,
        scratch.ctypes.data,
    )


@njit(error_model="numpy", nogil=True)
def _complete(stack, expert, first, values):  # type: ignore[no-untyped-def]
    """Products of one matrix with the factor and the biases that it has, from row ``first`` on, in place."""
    if stack[SCALE_OF_ALL] != 0:
        for i in range(values.size):
            values[i] *= _factor(stack, expert)
    if stack[BIAS] != 0:
        at = expert * stack[ROWS] + first
        for i in range(values.size):
            values[i] += read(stack[BIAS], at + i)


@njit(error_model="numpy", nogil=True)
def _add_share(share, values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] += share * values[i]


def _linear_on_unit(stack, configs, parts, x, out):  # type: ignore[no-untyped-def]
    """Fill ``out`` [R, N] with the products of one matrix with the rows of ``x`` [R, M]."""
    count, rows = x.shape[0], stack[ROWS]
    blocks, tokens = _block(count)
    each = stack[INPUT]
    room = _bytes(blocks * tokens * each)
    sums = np.empty((blocks * tokens, stack[SUMMED]), np.float32)
    nothing = np.zeros(x.shape[1], np.float32)
    for r in prange(blocks * tokens):
        values = x[r] if r < count else nothing
        _split(stack, values, room, r // tokens * tokens * each, r % tokens, tokens, sums[r])
    # As many blocks at once as a core's own cache holds.
    slab = max(min(CACHE // (tokens * each), blocks), 1)
    tiles = (rows + HEIGHT - 1) // HEIGHT
    parts = min(tiles, parts)
    for part in prange(parts):
        scratch = _bytes(stack[SCRATCH])
        made = np.empty((slab * tokens, HEIGHT), np.float32)
        for block in range(0, blocks, slab):
            some, row = min(slab, blocks - block), block * tokens
            for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
                first = tile * HEIGHT
                height = min(HEIGHT, rows - first)
                place = row * each
                _on_unit(
                    stack, configs, 0, first, height, room, place, sums[row:], some, tokens, scratch, made
                )
                for r in range(min(some * tokens, count - row)):
                    _complete(stack, 0, first, made[r, :height])
                    for i in range(height):
                        out[row + r, first + i] = made[r, i]


def _experts_on_unit(  # type: ignore[no-untyped-def]
    gated, gate, up, down, act, alpha, limit, num_experts, configs, parts, turn, some_left, x, indices,
    weights, out
):  # fmt: skip
    """Add to ``out`` [T, H] for T tokens; returns -1, or the position of the first index that is no expert.

    As ``driver``'s for many tokens: the pairs of a token and an expert are ordered by expert, and each part
    of the work takes its share of the rows of every matrix in use and adds in the order of ``turn``. An
    expert's inputs lie in blocks of one size.
    """
    top_k = indices.shape[1]
    h, f, pairs = x.shape[1], up[ROWS], indices.size
    flat = indices.reshape(pairs)
    begins = np.zeros(num_experts + 1, np.int64)
    for pair in range(pairs):
        if some_left and flat[pair] == -1:
            continue
        if flat[pair] < 0 or flat[pair] >= num_experts:
            return pair
        begins[flat[pair] + 1] += 1
    # Blocks of an expert are padded to one size: where its rows begin, and each row's place.
    padded, sizes = np.zeros(num_experts + 1, np.int64), np.ones((num_experts, 2), np.int64)
    most = 1
    for e in range(num_experts):
        sizes[e, 0], sizes[e, 1] = _block(max(begins[e + 1], 1))
        room_of = sizes[e, 0] * sizes[e, 1] if begins[e + 1] else 0
        most = max(most, room_of)
        padded[e + 1] = padded[e] + room_of
        begins[e + 1] += begins[e]
    total = padded[num_experts]
    order, expert_of = np.full(total, -1, np.int64), np.empty(total, np.int64)
    filled = np.zeros(num_experts, np.int64)
    for pair in range(pairs):
        e = flat[pair]
        if e >= 0:
            order[padded[e] + filled[e]] = pair
            filled[e] += 1
    for e in range(num_experts):
        for row in range(padded[e], padded[e + 1]):
            expert_of[row] = e

    each_up, each_gate, each_down = up[INPUT], gate[INPUT], down[INPUT]
    shared = not gated or up[SPLIT] == gate[SPLIT]
    room_up = _bytes(total * each_up)
    sums_up = np.empty((total, up[SUMMED]), np.float32)
    room_gate = room_up if shared else _bytes(total * each_gate)
    sums_gate = sums_up if shared else np.empty((total, gate[SUMMED]), np.float32)
    hidden = np.zeros((total, f), np.float32)
    nothing = np.zeros(h, np.float32)
    for row in prange(total):
        e = expert_of[row]
        size, inside = sizes[e, 1], row - padded[e]
        values = x[order[row] // top_k] if order[row] >= 0 else nothing
        block = row - inside % size
        _split(up, values, room_up, block * each_up, inside % size, size, sums_up[row])
        if not shared:
            _split(gate, values, room_gate, block * each_gate, inside % size, size, sums_gate[row])

    tiles = (f + HEIGHT - 1) // HEIGHT
    shares = min(tiles, parts)
    for part in prange(shares):
        scratch = _bytes(max(up[SCRATCH], gate[SCRATCH]))
        u, g = np.empty((most, HEIGHT), np.float32), np.empty((most, HEIGHT), np.float32)
        for e in turn:
            begin, number = padded[e], begins[e + 1] - begins[e]
            blocks, size = sizes[e]
            if number == 0:
                continue
            for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
                first = tile * HEIGHT
                count = min(HEIGHT, f - first)
                place = begin * each_up
                _on_unit(
                    up, configs, e, first, count, room_up, place, sums_up[begin:], blocks, size, scratch, u
                )
                if gated:
                    place = begin * each_gate
                    _on_unit(
                        gate,
                        configs,
                        e,
                        first,
                        count,
                        room_gate,
                        place,
                        sums_gate[begin:],
                        blocks,
                        size,
                        scratch,
                        g,
                    )
                for r in range(number):
                    _complete(up, e, first, u[r, :count])
                    if gated:
                        _complete(gate, e, first, g[r, :count])
                    for i in range(count):
                        other = g[r, i] if gated else u[r, i]
                        hidden[begin + r, first + i] = call_activation(act, other, u[r, i], alpha, limit)

    room_down = _bytes(total * each_down)
    sums_down = np.empty((total, down[SUMMED]), np.float32)
    for row in prange(total):
        size, inside = sizes[expert_of[row], 1], row - padded[expert_of[row]]
        block = row - inside % size
        _split(down, hidden[row], room_down, block * each_down, inside % size, size, sums_down[row])
    tiles = (h + HEIGHT - 1) // HEIGHT
    shares = min(tiles, parts)
    for part in prange(shares):
        scratch = _bytes(down[SCRATCH])
        y = np.empty((most, HEIGHT), np.float32)
        for e in turn:
            begin, number = padded[e], begins[e + 1] - begins[e]
            blocks, size = sizes[e]
            if number == 0:
                continue
            for tile in range(tiles * part // shares, tiles * (part + 1) // shares):
                first = tile * HEIGHT
                count = min(HEIGHT, h - first)
                place = begin * each_down
                _on_unit(
                    down,
                    configs,
                    e,
                    first,
                    count,
                    room_down,
                    place,
                    sums_down[begin:],
                    blocks,
                    size,
                    scratch,
                    y,
                )
                for r in range(number):
                    pair = order[begin + r]
                    token, share = pair // top_k, weights[pair // top_k, pair % top_k]
                    _complete(down, e, first, y[r, :count])
                    _add_share(share, y[r, :count], out[token, first : first + count])
    return -1


experts_on_unit = both_forms(_experts_on_unit)
linear_on_unit = both_forms(_linear_on_unit)
