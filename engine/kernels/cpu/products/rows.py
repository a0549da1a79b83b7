"""Rows of a stack times a vector, compiled for each storage format; works on addresses, not on arrays.

A *block* is the fewest whole 32-bit words that hold whole weights: 8 weights in a word at 4 bits, 32 in
3 words at 3 bits. Input ``i * P + p`` is kept at ``p * n + i`` (P weights a block, n blocks a row), so that
one position of consecutive blocks meets consecutive inputs: a vector lane is a block.
A weight that lies below a word's top bit is masked and not shifted: the power of two it is too large by
is divided out of the input (``Blocks.scales``), which is exact.
The code is written as LLVM vectors, since whether a loop over packed integers becomes vector code by itself
hangs on the compiler's mood. LLVM splits the vectors to what the machine has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import native
from mlx_experts.engine.kernels.request import Projection

LANES = 16  # blocks a step
ROWS = 4  # rows a step, which share what is read of the input
# Bytes that a row's data is asked for in advance. The hardware's own prefetching stops at each 4 KiB page:
# with this, one core reads 19 GB/s of 4-bit experts instead of 10 (EPYC, 2 cores, 2026-11-29).
AHEAD = 8192

I8, I16, I32, I64, F32 = (ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType())
_BYTES = {I8: 1, I16: 2, I32: 4, F32: 4}


@dataclass(frozen=True)
class Blocks:
    """How a row is cut into blocks.

    Args:
        weights: weights a block (P).
        words: 32-bit words a block; 0 when plain.
        scales: what each position's input is multiplied by beforehand.
    """

    weights: int
    words: int
    scales: tuple[float, ...]


def blocks_of(projection: Projection) -> Blocks:
    """The cut of a row for this storage format."""
    bits = projection.bits
    if projection.format == "plain":
        return Blocks(1, 0, (1.0,))
    if projection.format in ("mxfp4", "nvfp4"):
        return Blocks(8, 1, (0.5,) * 8)  # the decoder yields twice the value
    if projection.format == "mxfp8":
        return Blocks(4, 1, (1.0,) * 4)
    common = math.gcd(bits, 32)
    starts = [p * bits % 32 for p in range(32 // common)]
    return Blocks(len(starts), bits // common, tuple(2.0**-s if s + bits < 32 else 1.0 for s in starts))


@dataclass(frozen=True)
class Lanes:
    """Writes operations on vectors of ``count`` 32-bit lanes."""

    builder: Any
    count: int

    @cached_property
    def ints(self) -> ir.Type:
        return ir.VectorType(I32, self.count)

    @cached_property
    def floats(self) -> ir.Type:
        return ir.VectorType(F32, self.count)

    def whole(self, value: int) -> ir.Constant:
        return ir.Constant(self.ints, [value] * self.count)

    def real(self, value: float) -> ir.Constant:
        return ir.Constant(self.floats, [value] * self.count)

    def load(self, type_: ir.Type, address: Any, index: Any) -> Any:
        """``count`` elements from element ``index`` on."""
        size = _BYTES[type_]
        place = self.builder.add(address, self.builder.mul(index, ir.Constant(I64, size)))
        pointer = self.builder.inttoptr(place, ir.VectorType(type_, self.count).as_pointer())
        return self.builder.load(pointer, align=size)

    def store(self, floats: Any, address: Any, index: Any) -> None:
        """``count`` floats to element ``index`` and following."""
        place = self.builder.add(address, self.builder.mul(index, ir.Constant(I64, 4)))
        self.builder.store(floats, self.builder.inttoptr(place, self.floats.as_pointer()), align=4)

    def merge(self, first: Any, second: Any, positions: list[int]) -> Any:
        """Lanes of two vectors, those of the second counted on from the first's."""
        mask = ir.Constant(ir.VectorType(I32, len(positions)), positions)
        return self.builder.shuffle_vector(first, second, mask)

    def pick(self, vector: Any, positions: list[int]) -> Any:
        """The lanes of a vector at these positions, in this order."""
        mask = ir.Constant(ir.VectorType(I32, len(positions)), positions)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def as_ints(self, floats: Any) -> Any:
        return self.builder.bitcast(floats, self.ints)

    def as_floats(self, ints: Any) -> Any:
        return self.builder.bitcast(ints, self.floats)

    def shifted_left(self, ints: Any, by: int) -> Any:
        return self.builder.shl(ints, self.whole(by))

    def masked(self, ints: Any, mask: int) -> Any:
        return self.builder.and_(ints, self.whole(mask))

    def signed(self, magnitude: Any, sign: Any) -> Any:
        """Floats with the sign bits of ``sign``."""
        return self.as_floats(self.builder.or_(self.as_ints(magnitude), sign))

    def where(self, test: str, a: Any, b: int, yes: Any, no: Any) -> Any:
        return self.builder.select(self.builder.icmp_unsigned(test, a, self.whole(b)), yes, no)

    def small_floats(self, raw: Any, bias: int) -> Any:
        """Floats narrower than float32 from their bits without the sign, moved to float32's mantissa.

        A zero exponent is read as if it were one and the leading one is taken off again, so that no float32
        subnormal occurs: processors are slow on those, or set to drop them.
        """
        placed = self.builder.add(raw, self.whole((127 - bias) << 23))
        raised = self.as_floats(self.builder.add(placed, self.whole(1 << 23)))
        subnormal = self.builder.fsub(raised, self.real(2.0 ** (1 - bias)))
        return self.where("<", raw, 1 << 23, subnormal, self.as_floats(placed))

    def from_e4m3(self, byte: Any) -> Any:
        """8-bit floats (4 exponent, 3 mantissa bits) held in the low bits."""
        raw = self.shifted_left(self.masked(byte, 0x7F), 20)
        value = self.where("==", raw, 0x7F << 20, self.real(math.nan), self.small_floats(raw, 7))
        return self.signed(value, self.shifted_left(self.masked(byte, 0x80), 24))

    def from_f16(self, half: Any) -> Any:
        """IEEE halves held in the low bits."""
        raw = self.shifted_left(self.masked(half, 0x7FFF), 13)
        special = self.as_floats(self.builder.or_(raw, self.whole(0x7F800000)))
        value = self.where(">=", raw, 31 << 23, special, self.small_floats(raw, 15))
        return self.signed(value, self.shifted_left(self.masked(half, 0x8000), 16))

    def from_e8m0(self, byte: Any) -> Any:
        """Powers of two; byte 0 is 2**-127, which has no normal float32."""
        return self.as_floats(self.where("==", byte, 0, self.whole(1 << 22), self.shifted_left(byte, 23)))

    def stored_floats(self, dtype: str, address: Any, index: Any) -> Any:
        """Scales, biases or plain weights as float32."""
        if dtype == "float32":
            return self.load(F32, address, index)
        half = self.builder.zext(self.load(I16, address, index), self.ints)
        return self.as_floats(self.shifted_left(half, 16)) if dtype == "bfloat16" else self.from_f16(half)

    def stored_scales(self, projection: Projection, address: Any, index: Any) -> Any:
        if projection.format == "affine":
            return self.stored_floats(projection.dtype, address, index)
        byte = self.builder.zext(self.load(I8, address, index), self.ints)
        return self.from_e4m3(byte) if projection.format == "nvfp4" else self.from_e8m0(byte)

    def affine_field(self, bits: int, words: list[Any], position: int) -> Any:
        """The integers at one position as float32, still shifted where ``Blocks.scales`` undoes it."""
        mask, start = (1 << bits) - 1, position * bits
        word, shift = words[start // 32], start % 32
        if shift + bits < 32:
            return self.builder.uitofp(self.masked(word, mask << shift), self.floats)
        field = self.builder.lshr(word, self.whole(shift))
        if shift + bits > 32:
            rest = self.shifted_left(words[start // 32 + 1], 32 - shift)
            field = self.masked(self.builder.or_(field, rest), mask)
        return self.builder.uitofp(field, self.floats)

    def e2m1_field(self, word: Any, position: int) -> Any:
        """Twice the 4-bit floats at one position: 0 1 2 3 4 6 8 12 and their negatives."""
        nibble = self.builder.lshr(word, self.whole(4 * position))
        entry = self.shifted_left(self.masked(nibble, 7), 2)
        magnitude = self.masked(self.builder.lshr(self.whole(0xC8643210), entry), 15)
        sign = self.shifted_left(self.masked(nibble, 8), 28)
        return self.signed(self.builder.uitofp(magnitude, self.floats), sign)

    def total(self, floats: Any) -> Any:
        """The sum of the lanes, halves first."""
        lanes = self
        while lanes.count > 1:
            half = Lanes(self.builder, lanes.count // 2)
            low, high = (self.pick(floats, list(range(o, o + half.count))) for o in (0, half.count))
            floats, lanes = self.builder.fadd(low, high), half
        return self.builder.extract_element(floats, ir.Constant(I32, 0))


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address, which need not be one that may be read."""
    byte = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read_near_data = [ir.Constant(I32, v) for v in (0, 3, 1)]
    builder.call(function, [builder.inttoptr(address, byte), *read_near_data])


def values_of(lanes: Lanes, projection: Projection, row: Any, block: Any) -> Callable[[int], Any]:
    """The weights of ``lanes.count`` blocks of a row, as a function of the position in the block."""
    if projection.format == "plain":
        return lambda position: lanes.stored_floats(projection.dtype, row, block)
    count = blocks_of(projection).words
    wide = Lanes(lanes.builder, lanes.count * count)
    together = wide.load(I32, row, lanes.builder.mul(block, ir.Constant(I64, count)))
    words = [lanes.pick(together, list(range(j, wide.count, count))) for j in range(count)]
    if projection.format == "affine":
        return lambda position: lanes.affine_field(projection.bits, words, position)
    if projection.format == "mxfp8":
        return lambda position: lanes.from_e4m3(lanes.builder.lshr(words[0], lanes.whole(8 * position)))
    return lambda position: lanes.e2m1_field(words[0], position)


def for_each_block(lanes: Lanes, per_group: int, block: Any, read: Callable[[Lanes, Any], Any]) -> Any:
    """What ``read(lanes, group)`` gives for groups, spread over the blocks of those groups."""
    builder = lanes.builder
    group = builder.udiv(block, ir.Constant(I64, per_group))
    groups = max(lanes.count // per_group, 1)
    return lanes.pick(
        read(Lanes(builder, groups), group), [i * groups // lanes.count for i in range(lanes.count)]
    )


def _step(
    lanes: Lanes,
    projection: Projection,
    rows: list[tuple[Any, Any, Any]],
    x: Any,
    sums: Any,
    n: Any,
    block: Any,
) -> list[Any]:
    """What ``lanes.count`` blocks from ``block`` on add to each row, lane by lane."""
    builder = lanes.builder
    blocks = blocks_of(projection)
    per_group = max(projection.group_size // blocks.weights, 1)
    values = [values_of(lanes, projection, row, block) for row, _, _ in rows]
    parts: list[Any] = [None] * len(rows)
    for position in range(blocks.weights):
        at = builder.add(builder.mul(n, ir.Constant(I64, position)), block)
        inputs = lanes.load(F32, x, at)
        for r, value in enumerate(values):
            product = builder.fmul(value(position), inputs)
            parts[r] = product if parts[r] is None else builder.fadd(parts[r], product)
    if projection.format == "plain":
        return parts
    for r, (_, scales, biases) in enumerate(rows):

        def scale(few: Lanes, group: Any, at: Any = scales) -> Any:
            return few.stored_scales(projection, at, group)

        def bias(few: Lanes, group: Any, at: Any = biases) -> Any:
            return few.stored_floats(projection.dtype, at, group)

        parts[r] = builder.fmul(parts[r], for_each_block(lanes, per_group, block, scale))
        if projection.format == "affine":
            shift = builder.fmul(for_each_block(lanes, per_group, block, bias), lanes.load(F32, sums, block))
            parts[r] = builder.fadd(parts[r], shift)
    return parts


def steps_of(projection: Projection) -> list[int]:
    """Blocks that are taken together: as many as fit, then what is left in ever smaller steps."""
    blocks = blocks_of(projection)
    last = min(max(projection.group_size // blocks.weights, 1), LANES)
    # At 16 or 32 weights a block whole rows may be shorter than LANES blocks.
    middle = {LANES // 2} if blocks.weights >= LANES and last < LANES // 2 else set()
    return sorted({LANES, last} | middle, reverse=True)


def _write_rows(
    builder: Any, projection: Projection, count: int, sizes: list[int], arguments: list[Any]
) -> None:
    """Write the products of ``count`` rows, in steps of these numbers of blocks."""
    weights, scales, biases, row_bytes, scale_bytes, x, sums, n, out = arguments
    width = 4 * blocks_of(projection).words or projection.bits // 8
    rows = []
    for r in range(count):
        far = ir.Constant(I64, r)
        w = builder.add(weights, builder.mul(row_bytes, far))
        s, b = (builder.add(a, builder.mul(scale_bytes, far)) for a in (scales, biases))
        rows.append((w, s, b))
    totals: list[Any] = [ir.Constant(F32, 0.0)] * count
    first = ir.Constant(I64, 0)
    for size in sizes:
        lanes = Lanes(builder, size)
        held = [cgutils.alloca_once(builder, lanes.floats) for _ in rows]
        for place in held:
            builder.store(lanes.real(0.0), place)
        steps = builder.udiv(builder.sub(n, first), ir.Constant(I64, size))
        with cgutils.for_range(builder, steps) as loop:
            block = builder.add(first, builder.mul(loop.index, ir.Constant(I64, size)))
            ahead = builder.add(builder.mul(block, ir.Constant(I64, width)), ir.Constant(I64, AHEAD))
            for w, _, _ in rows:
                prefetch(builder, builder.add(w, ahead))
            parts = _step(lanes, projection, rows, x, sums, n, block)
            for place, part in zip(held, parts, strict=True):
                builder.store(builder.fadd(builder.load(place), part), place)
        first = builder.add(first, builder.mul(steps, ir.Constant(I64, size)))
        totals = [builder.fadd(t, lanes.total(builder.load(p))) for t, p in zip(totals, held, strict=True)]
    for r, total in enumerate(totals):
        place = builder.add(out, ir.Constant(I64, 4 * r))
        builder.store(total, builder.inttoptr(place, F32.as_pointer()), align=4)


def rows_product(projection: Projection) -> native.Native:
    """The compiled product of rows with a vector.

    Returns:
        A function ``(weights, scales, biases, row_bytes, scale_bytes, count, x, sums, n, out)``. The first
        three are addresses of the first row's data and ``row_bytes`` and ``scale_bytes`` lead from row to
        row; ``count`` rows are computed; ``x`` is the input by position, ``sums`` its sum over each of the
        ``n`` blocks, ``out`` room for ``count`` floats.
    """
    sizes = steps_of(projection)

    def write(builder: Any, arguments: list[Any]) -> None:
        w, s, b, row_bytes, scale_bytes, count, x, sums, n, out = arguments
        steps = builder.udiv(count, ir.Constant(I64, ROWS))
        done = builder.mul(steps, ir.Constant(I64, ROWS))

        def rows_from(row: Any, together: int, sizes: list[int]) -> None:
            at = builder.mul(row, scale_bytes)
            places = [builder.add(w, builder.mul(row, row_bytes)), builder.add(s, at), builder.add(b, at)]
            target = builder.add(out, builder.mul(row, ir.Constant(I64, 4)))
            _write_rows(
                builder, projection, together, sizes, [*places, row_bytes, scale_bytes, x, sums, n, target]
            )

        with cgutils.for_range(builder, steps) as loop:
            rows_from(builder.mul(loop.index, ir.Constant(I64, ROWS)), ROWS, sizes)
        # Single rows are left over only where the number of rows is no multiple of ROWS.
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            rows_from(builder.add(loop.index, done), 1, sizes[-1:])

    return native.function("rows_product", 10, write)
