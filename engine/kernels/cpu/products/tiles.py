"""Many rows at once: rows of a matrix decoded to float32, and products of such rows with several inputs.

A tile is a few rows of weights as float32, in the order in which ``rows`` lays out an input (input ``i * P +
p`` at ``p * n + i``), so that a product is a plain dot product of two rows of memory. Decoding a tile costs
about as much as multiplying it with two inputs, and it is done once for all of them. Rows are padded with
zeros to whole ``PADDING``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import native
from mlx_experts.engine.kernels.cpu.products.rows import (
    F32,
    I64,
    Lanes,
    blocks_of,
    for_each_block,
    prefetch,
    steps_of,
    values_of,
)
from mlx_experts.engine.kernels.request import Projection

PADDING = 16  # floats that a row of a tile, or of an input, is a multiple of
AHEAD = 4096  # bytes of packed weights that are asked for in advance


@dataclass(frozen=True)
class Shape:
    """How many rows of weights and of inputs the innermost loop multiplies: their sums fill the registers.

    Args:
        lanes: floats a vector.
        weights: rows of weights.
        inputs: the most rows of inputs.
    """

    lanes: int
    weights: int
    inputs: int


@lru_cache(maxsize=1)
def shape() -> Shape:
    """The shape for this processor: 32 vector registers on AVX-512 and on ARM, 16 elsewhere."""
    lanes = native.vector_lanes()
    many = lanes == 16 or native.is_arm()
    return Shape(lanes, 4, 6) if many else Shape(lanes, 2, 6)


def decode_rows(projection: Projection) -> native.Native:
    """The compiled decoder of rows.

    Returns:
        A function ``(weights, scales, biases, row_bytes, scale_bytes, count, n, out, stride)``: as
        ``rows.rows_product`` for the first six; ``n`` blocks a row; ``out`` receives ``count`` rows of
        float32, ``stride`` bytes apart.
    """
    blocks = blocks_of(projection)
    width = 4 * blocks.words or projection.bits // 8

    def write(builder: Any, arguments: list[Any]) -> None:
        w, s, b, row_bytes, scale_bytes, count, n, out, stride = arguments
        with cgutils.for_range(builder, count) as rows:
            row = builder.add(w, builder.mul(rows.index, row_bytes))
            scales, biases = (builder.add(a, builder.mul(rows.index, scale_bytes)) for a in (s, b))
            target = builder.add(out, builder.mul(rows.index, stride))
            first = ir.Constant(I64, 0)
            for size in steps_of(projection):
                lanes = Lanes(builder, size)
                steps = builder.udiv(builder.sub(n, first), ir.Constant(I64, size))
                with cgutils.for_range(builder, steps) as loop:
                    block = builder.add(first, builder.mul(loop.index, ir.Constant(I64, size)))
                    ahead = builder.add(builder.mul(block, ir.Constant(I64, width)), ir.Constant(I64, AHEAD))
                    prefetch(builder, builder.add(row, ahead))
                    _decode_step(lanes, projection, (row, scales, biases), n, block, target)
                first = builder.add(first, builder.mul(steps, ir.Constant(I64, size)))

    return native.function("decode_rows", 9, write)


def _decode_step(
    lanes: Lanes, projection: Projection, row: tuple[Any, Any, Any], n: Any, block: Any, out: Any
) -> None:
    """Write the weights of ``lanes.count`` blocks of a row."""
    builder, blocks = lanes.builder, blocks_of(projection)
    weights, scales, biases = row
    per_group = max(projection.group_size // blocks.weights, 1)
    value = values_of(lanes, projection, weights, block)
    scale = shift = None
    if projection.format != "plain":
        scale = for_each_block(
            lanes, per_group, block, lambda few, group: few.stored_scales(projection, scales, group)
        )
    if projection.format == "affine":
        shift = for_each_block(
            lanes, per_group, block, lambda few, group: few.stored_floats(projection.dtype, biases, group)
        )
    for position in range(blocks.weights):
        weight = value(position)
        if blocks.scales[position] != 1.0:
            weight = builder.fmul(weight, lanes.real(blocks.scales[position]))
        if scale is not None:
            weight = builder.fmul(weight, scale)
        if shift is not None:
            weight = builder.fadd(weight, shift)
        at = builder.add(builder.mul(n, ir.Constant(I64, position)), block)
        lanes.store(weight, out, at)


def dot_tile() -> native.Native:
    """The compiled product of a tile with several inputs; the same for every format.

    Returns:
        A function ``(w, stride, rows, inputs, outputs, count, offset, length, column, add)``: ``rows`` rows
        of float32 from address ``w``, ``stride`` bytes apart; ``inputs`` and ``outputs`` are the addresses of
        ``count`` addresses of rows; ``offset`` floats are left out at the beginning of every row and
        ``length`` (a multiple of ``PADDING``) are multiplied; the sums go to ``column`` and following of each
        output, added to what is there where ``add`` is not 0. Any ``rows`` and ``count`` are taken, in steps
        of ``shape``.
    """
    form = shape()

    def write(builder: Any, arguments: list[Any]) -> None:
        w, stride, rows, inputs, outputs, count, offset, length, column, add = arguments
        tile_rows = ir.Constant(I64, form.weights)
        full = builder.udiv(count, ir.Constant(I64, form.inputs))
        rest = builder.sub(count, builder.mul(full, ir.Constant(I64, form.inputs)))
        whole = builder.udiv(rows, tile_rows)
        rows_left = builder.sub(rows, builder.mul(whole, tile_rows))
        skipped = builder.mul(offset, ir.Constant(I64, 4))
        steps = builder.udiv(length, ir.Constant(I64, form.lanes))

        def product(row: Any, first: Any, height: int, together: int) -> None:
            """``height`` rows from ``row`` on times ``together`` inputs from ``first`` on."""
            table = builder.mul(first, ir.Constant(I64, 8))
            sources, targets = builder.add(inputs, table), builder.add(outputs, table)
            at = builder.mul(builder.add(column, row), ir.Constant(I64, 4))
            begin = builder.add(builder.add(w, skipped), builder.mul(row, stride))
            _products(
                Lanes(builder, form.lanes),
                [builder.add(begin, builder.mul(stride, ir.Constant(I64, r))) for r in range(height)],
                [builder.add(_pointer(builder, sources, i), skipped) for i in range(together)],
                [builder.add(_pointer(builder, targets, i), at) for i in range(together)],
                steps,
                add,
            )

        def tile_rows_from(tile: Any) -> Any:
            return builder.mul(tile, tile_rows)

        with cgutils.for_range(builder, full) as group:
            first = builder.mul(group.index, ir.Constant(I64, form.inputs))
            with cgutils.for_range(builder, whole) as tile:
                product(tile_rows_from(tile.index), first, form.weights, form.inputs)
        done = builder.sub(count, rest)
        for together in range(1, form.inputs):
            left = builder.icmp_unsigned("==", rest, ir.Constant(I64, together))
            with builder.if_then(left), cgutils.for_range(builder, whole) as tile:
                product(tile_rows_from(tile.index), done, form.weights, together)
        # Rows that are left over, one by one: few matrices have them.
        last = builder.mul(whole, tile_rows)
        with cgutils.for_range(builder, rows_left) as row, cgutils.for_range(builder, count) as each:
            product(builder.add(last, row.index), each.index, 1, 1)

    return native.function("dot_tile", 10, write)


def _pointer(builder: Any, table: Any, index: int) -> Any:
    """The address at an index of a table of addresses."""
    place = builder.add(table, ir.Constant(I64, 8 * index))
    return builder.load(builder.inttoptr(place, I64.as_pointer()), align=8)


def _products(
    lanes: Lanes, weights: list[Any], inputs: list[Any], outputs: list[Any], steps: Any, add: Any
) -> None:
    """Dot products of every row of weights with every input, ``steps`` vectors long."""
    builder = lanes.builder
    held = [[cgutils.alloca_once(builder, lanes.floats) for _ in weights] for _ in inputs]
    for place in [p for some in held for p in some]:
        builder.store(lanes.real(0.0), place)
    with cgutils.for_range(builder, steps) as loop:
        at = builder.mul(loop.index, ir.Constant(I64, lanes.count))
        rows = [lanes.load(F32, w, at) for w in weights]
        for x, places in zip(inputs, held, strict=True):
            values = lanes.load(F32, x, at)
            for row, place in zip(rows, places, strict=True):
                builder.store(builder.fadd(builder.load(place), builder.fmul(row, values)), place)
    first = 0
    while first < len(inputs):
        # As many inputs as fill one vector with sums, a power of two of them.
        together = 1 << (min(len(inputs) - first, max(lanes.count // len(weights), 1)).bit_length() - 1)
        sums = _sums(lanes, [builder.load(p) for some in held[first : first + together] for p in some])
        for i in range(together):
            few = Lanes(builder, len(weights))
            part = lanes.pick(sums, list(range(i * few.count, (i + 1) * few.count)))
            place = builder.inttoptr(outputs[first + i], few.floats.as_pointer())
            before = builder.load(place, align=4)
            fresh = builder.icmp_unsigned("==", add, ir.Constant(I64, 0))
            builder.store(builder.select(fresh, part, builder.fadd(part, before)), place, align=4)
        first += together


def _sums(lanes: Lanes, vectors: list[Any]) -> Any:
    """A vector of the lanes' sums of a power of two of vectors, at most ``lanes.count``."""
    builder, each = lanes.builder, lanes.count
    while len(vectors) > 1:
        each //= 2
        segments = range(0, lanes.count, 2 * each)
        low = [s + i for s in segments for i in range(each)]
        masks = [[*half, *(lanes.count + i for i in half)] for half in (low, [i + each for i in low])]
        vectors = [
            builder.fadd(*(lanes.merge(a, b, mask) for mask in masks))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    (vector,) = vectors
    width = lanes.count
    while each > 1:
        each //= 2
        low = [s + i for s in range(0, width, 2 * each) for i in range(each)]
        vector = builder.fadd(lanes.pick(vector, low), lanes.pick(vector, [i + each for i in low]))
        width //= 2
    return vector
