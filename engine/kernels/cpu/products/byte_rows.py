"""Rows of packed weights times one input that is given as bytes: AVX-512's dot products of bytes (VNNI).

A *line* is 64 bytes of a row: 16 words of 32 bits, a lane each. The bytes of a line hold several codes, the
lowest first; ``pieces`` of a line have one code a byte. An input is whole numbers of one or more *digits* of
8 bits, the highest first, times a factor for each word: a line of it is, for each digit and each piece, the
64 bytes that meet the codes of that piece. Sums of products are exact, and are scaled as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import native
from mlx_experts.engine.kernels.cpu.products.rows import (
    AHEAD,
    F32,
    I8,
    I32,
    I64,
    ROWS,
    Lanes,
    blocks_of,
    for_each_block,
    prefetch,
)
from mlx_experts.engine.kernels.request import Projection

LINE = 64  # bytes
WORDS = 16  # of a line
NEEDED = ("avx512vnni", "avx512bw", "avx512vl")  # what the processor must have
# Twice the 4-bit floats, raised so that none is negative: the first factors of a dot product are unsigned.
RAISED = 12
_E2M1 = [RAISED + sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12)]


def called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def spread(builder: Any, value: Any, kind: Any) -> Any:
    """A vector of one value."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def pieces_of(bits: int) -> int:
    """Codes of a byte."""
    return 8 // bits


def codes_of_line(projection: Projection) -> int:
    """Weights of a line."""
    return LINE * pieces_of(projection.bits)


@dataclass(frozen=True)
class _SomeLanes(Lanes):
    """Lanes of which only the first ``left`` are read; the others are zero."""

    left: Any = None

    def load(self, type_: ir.Type, address: Any, index: Any) -> Any:
        """As :meth:`Lanes.load`, without touching what lies behind."""
        if self.count == 1:
            return super().load(type_, address, index)
        builder, kind = self.builder, ir.VectorType(type_, self.count)
        size = {I8: 1, F32: 4, I32: 4}.get(type_, 2)
        place = builder.inttoptr(builder.add(address, builder.mul(index, I64(size))), kind.as_pointer())
        counted = ir.VectorType(I32, self.count)
        left = spread(builder, builder.trunc(self.left, I32), counted)
        mask = builder.icmp_unsigned("<", ir.Constant(counted, list(range(self.count))), left)
        name = f"llvm.masked.load.v{self.count}{_NAMES[type_]}.p0"
        return called(builder, name, kind, place, I32(size), mask, ir.Constant(kind, None))


_NAMES = {I8: "i8", ir.IntType(16): "i16", I32: "i32", F32: "f32"}


@dataclass(frozen=True, eq=False)
class _Row:
    """Addresses of one row's arrays, and where its sums are kept."""

    weights: Any
    scales: Any
    biases: Any
    held: Any


@dataclass(frozen=True, eq=False)
class _Writer:
    """Writes the products of some rows with one input, a line of each at a time."""

    builder: Any
    projection: Projection
    digits: int
    x: Any
    sums: Any
    n: Any

    @property
    def raised(self) -> bool:
        """Whether the codes stand for numbers below zero, too."""
        return self.projection.format != "affine"

    def codes(self, words: Any) -> list[Any]:
        """The pieces of a line, a whole number that is not negative in each byte."""
        builder, bits, lanes = self.builder, self.projection.bits, Lanes(self.builder, WORDS)
        line = ir.VectorType(I8, LINE)
        if bits == 8:
            return [builder.bitcast(words, line)]
        mask, found = ((1 << bits) - 1) * 0x01010101, []
        for piece in range(pieces_of(bits)):
            shifted = builder.lshr(words, lanes.whole(piece * bits)) if piece else words
            found.append(builder.bitcast(lanes.masked(shifted, mask), line))
        if self.raised:
            table = ir.Constant(line, _E2M1 * 4)
            return [called(builder, "llvm.x86.avx512.pshuf.b.512", line, table, some) for some in found]
        return found

    def inputs(self, line: Any) -> list[Any]:
        """The bytes of the input that meet a line: digit by digit, piece by piece."""
        builder, count = self.builder, self.digits * pieces_of(self.projection.bits)
        kind = ir.VectorType(I8, LINE)
        begin = builder.add(self.x, builder.mul(line, I64(LINE * count)))
        at = [builder.add(begin, I64(LINE * i)) for i in range(count)]
        return [builder.load(builder.inttoptr(place, kind.as_pointer()), align=1) for place in at]

    def line(self, rows: list[_Row], line: Any, left: Any = None) -> None:
        """Add the products of one line; of its words only the first ``left`` where that is given."""
        builder, p = self.builder, self.projection
        lanes: Lanes = Lanes(builder, WORDS) if left is None else _SomeLanes(builder, WORDS, left)
        block, skipped = builder.mul(line, I64(WORDS)), builder.mul(line, I64(LINE))
        for row in rows:
            prefetch(builder, builder.add(row.weights, builder.add(skipped, I64(AHEAD))))
        totals = lanes.load(I32 if self.raised else F32, self.sums, block)
        factors = lanes.load(F32, self.sums, builder.add(self.n, block))
        inputs = self.inputs(line)
        per_group = p.group_size // blocks_of(p).weights

        def over_groups(read: Any) -> Any:
            """What ``read`` gives for each group, spread over the words of the line."""
            if left is None:
                return for_each_block(lanes, per_group, block, read)
            groups = builder.udiv(builder.add(left, I64(per_group - 1)), I64(per_group))
            return for_each_block(
                lanes,
                per_group,
                block,
                lambda few, group: read(_SomeLanes(builder, few.count, groups), group),
            )

        for row in rows:
            codes = self.codes(lanes.load(I32, builder.add(row.weights, skipped), I64(0)))
            part = builder.sitofp(self.products(codes, inputs, totals), lanes.floats)
            scale = over_groups(lambda few, group, at=row.scales: few.stored_scales(p, at, group))
            sum_ = builder.fadd(builder.load(row.held), builder.fmul(part, builder.fmul(scale, factors)))
            if not self.raised:
                bias = over_groups(lambda few, group, at=row.biases: few.stored_floats(p.dtype, at, group))
                sum_ = builder.fadd(sum_, builder.fmul(bias, totals))
            builder.store(sum_, row.held)

    def products(self, codes: list[Any], inputs: list[Any], totals: Any) -> Any:
        """Sums of products a word, as whole numbers."""
        builder, lanes = self.builder, Lanes(self.builder, WORDS)
        sum_, given = lanes.whole(0), iter(inputs)
        for digit in range(self.digits):
            if digit:
                sum_ = lanes.shifted_left(sum_, 8)
            if self.raised and digit == self.digits - 1:
                sum_ = builder.add(sum_, totals)
            for code in codes:
                name = "llvm.x86.avx512.vpdpbusd.512"
                sum_ = called(builder, name, lanes.ints, sum_, code, next(given))
        return sum_


def rows_product(projection: Projection, digits: int, tail: bool) -> native.Native:
    """The compiled product of rows with one input.

    Args:
        digits: of the input; three fit beside codes of at most 4 bits.
        tail: whether rows may end within a line.

    Returns:
        A function as ``rows.rows_product`` describes. ``x`` is the input as above; ``sums`` has for each
        word the sum of the input, as float32, and behind those the factors. For the formats whose codes are
        signed it has, instead of the sum, what the raised codes add, as a whole number of 32 bits.
    """

    def write(builder: Any, arguments: list[Any]) -> None:
        w, s, b, row_bytes, scale_bytes, count, x, sums, n, out = arguments
        writer = _Writer(builder, projection, digits, x, sums, n)
        lanes = Lanes(builder, WORDS)
        steps = builder.udiv(count, I64(ROWS))
        done = builder.mul(steps, I64(ROWS))
        lines = builder.udiv(n, I64(WORDS))
        left = builder.urem(n, I64(WORDS))

        def rows_from(row: Any, together: int) -> None:
            rows = []
            for r in range(together):
                at = builder.add(row, I64(r))
                beside = builder.mul(at, scale_bytes)
                held = cgutils.alloca_once(builder, lanes.floats)
                builder.store(lanes.real(0.0), held)
                weights = builder.add(w, builder.mul(at, row_bytes))
                rows.append(_Row(weights, builder.add(s, beside), builder.add(b, beside), held))
            with cgutils.for_range(builder, lines) as loop:
                writer.line(rows, loop.index)
            if tail:
                with builder.if_then(builder.icmp_unsigned("!=", left, I64(0))):
                    writer.line(rows, lines, left)
            for r, each in enumerate(rows):
                at = builder.add(out, builder.mul(builder.add(row, I64(r)), I64(4)))
                place = builder.inttoptr(at, F32.as_pointer())
                builder.store(lanes.total(builder.load(each.held)), place, align=4)

        with cgutils.for_range(builder, steps) as loop:
            rows_from(builder.mul(loop.index, I64(ROWS)), ROWS)
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            rows_from(builder.add(loop.index, done), 1)

    return native.function("byte_rows", 10, write)
