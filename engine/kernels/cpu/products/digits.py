"""Inputs in float32 as whole numbers of 24 bits, for weights of 2 or 4 bits: as exact as float32, and faster.

An input of a word of weights (8 inputs at 4 bits) is a whole number times a power of two that the largest
of them decides. Its three bytes meet the weights in dot products of bytes, whose sums are exact. Products in
float32 round each of them: both are some 1e-7 from the truth.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import native
from mlx_experts.engine.kernels.cpu.products import byte_rows
from mlx_experts.engine.kernels.cpu.products.byte_rows import LINE, RAISED, WORDS, called, pieces_of, spread
from mlx_experts.engine.kernels.cpu.products.rows import F32, I8, I32, I64, Lanes, blocks_of
from mlx_experts.engine.kernels.request import Projection

DIGITS = 3
# Digits are bytes with a sign, so that the largest whole number is 127 * (1 + 2**8 + 2**16), less than 2**23.
_ROOM = 1.005  # more than 2**23 over that number
_BELOW = 22  # the exponent of the largest input is that of its whole number plus this
_ZERO = 0x808080  # three digits of zero, raised by 128 each


def takes(projection: Projection) -> bool:
    """Whether a stack is multiplied in this way on this processor."""
    p = projection
    if p.format == "affine" and p.bits not in (2, 4):
        return False
    if p.format not in ("affine", "mxfp4", "nvfp4") or not native.has(*byte_rows.NEEDED):
        return False
    # The digits lie where a row of float32 inputs has room.
    lines = -(-p.cols // byte_rows.codes_of_line(p))
    return lines * LINE * DIGITS * pieces_of(p.bits) <= 4 * p.cols


def ends_within_a_line(projection: Projection) -> bool:
    """Whether rows of this width need the code for what is left over."""
    return projection.cols % byte_rows.codes_of_line(projection) != 0


def rows_product(projection: Projection, tail: bool) -> native.Native:
    """The compiled product of rows with one input; see ``byte_rows.rows_product``."""
    return byte_rows.rows_product(projection, DIGITS, tail)


def quantise(projection: Projection) -> native.Native:
    """The compiled split of inputs into digits for ``rows_product``.

    Returns:
        A function ``(x, first, count, out, sums, n)``: ``count`` float32 from address ``x``, whole words of
        weights, are the inputs ``first`` and following of a row; their digits go to the row ``out``;
        ``sums`` receives what ``byte_rows.rows_product`` wants of the row's ``n`` words.
    """
    size = blocks_of(projection).weights

    def write(builder: Any, arguments: list[Any]) -> None:
        x, first, count, out, sums, n = arguments
        with cgutils.for_range(builder, builder.udiv(count, I64(size))) as loop:
            skipped = builder.mul(loop.index, I64(size))
            word = builder.udiv(builder.add(first, skipped), I64(size))
            whole, factor = _whole_numbers(builder, Lanes(builder, size), x, skipped)
            _store_digits(builder, projection, whole, out, word)
            total = called(builder, f"llvm.vector.reduce.add.v{size}i32", I32, whole)
            if projection.format == "affine":
                total = builder.fmul(builder.sitofp(total, F32), factor, flags=())
            else:
                total = builder.mul(total, I32(-RAISED))
                factor = builder.fmul(factor, F32(0.5), flags=())  # the codes are twice the values
            for at, value in ((word, total), (builder.add(n, word), factor)):
                place = builder.add(sums, builder.mul(at, I64(4)))
                builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)

    return native.function("digits", 6, write)


def _whole_numbers(builder: Any, lanes: Lanes, x: Any, first: Any) -> tuple[Any, Any]:
    """Inputs from ``first`` on as whole numbers in 32 bits, and their factor; NaN where one is not finite."""
    values = lanes.load(F32, x, first)
    size = lanes.masked(lanes.as_ints(values), 0x7FFFFFFF)
    most = builder.bitcast(called(builder, f"llvm.vector.reduce.umax.v{lanes.count}i32", I32, size), F32)
    raised = builder.bitcast(builder.fmul(most, F32(_ROOM), flags=()), I32)
    exponent = builder.lshr(raised, I32(23))
    lowest = I32(_BELOW + 2)
    exponent = builder.select(builder.icmp_unsigned("<", exponent, lowest), lowest, exponent)
    sound = builder.icmp_unsigned("<", exponent, I32(255))
    inverse = builder.shl(builder.sub(I32(254 + _BELOW), exponent), I32(23))
    power = builder.bitcast(builder.shl(builder.sub(exponent, I32(_BELOW)), I32(23)), F32)
    scaled = builder.fmul(values, spread(builder, builder.bitcast(inverse, F32), lanes.floats), flags=())
    rounded = called(builder, f"llvm.nearbyint.v{lanes.count}f32", lanes.floats, scaled)
    safe = builder.select(sound, rounded, lanes.real(0.0))
    return builder.fptosi(safe, lanes.ints), builder.select(sound, power, F32(math.nan))


def _store_digits(builder: Any, projection: Projection, whole: Any, out: Any, word: Any) -> None:
    """Put the digits of a word's inputs where its line has them."""
    lanes, pieces = Lanes(builder, whole.type.count), pieces_of(projection.bits)
    digits = builder.xor(builder.add(whole, lanes.whole(_ZERO)), lanes.whole(_ZERO))
    as_bytes = builder.bitcast(digits, ir.VectorType(I8, 4 * lanes.count))
    order = [
        4 * (pieces * byte + piece) + digit
        for digit in reversed(range(DIGITS))
        for piece in range(pieces)
        for byte in range(4)
    ]
    picked = Lanes(builder, len(order)).pick(as_bytes, order)
    words = builder.bitcast(picked, ir.VectorType(I32, DIGITS * pieces))
    line, lane = builder.udiv(word, I64(WORDS)), builder.urem(word, I64(WORDS))
    begin = builder.add(out, builder.mul(line, I64(LINE * DIGITS * pieces)))
    begin = builder.add(begin, builder.mul(lane, I64(4)))
    for i in range(DIGITS * pieces):
        place = builder.inttoptr(builder.add(begin, I64(LINE * i)), I32.as_pointer())
        builder.store(builder.extract_element(words, I32(i)), place, align=4)
