"""Products of packed weights with inputs rounded to 8-bit integers: a declared choice, not float32-exact.

Every ``GROUP`` neighbours of an input share a scale, their largest magnitude over 127, as llama.cpp's Q8_0
has it for 32. The products are whole numbers and are scaled as float32. A single input goes through
AVX-512's dot products of bytes (VNNI), several through the tiles of ``amx``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import native
from mlx_experts.engine.kernels.cpu.products import amx, byte_rows
from mlx_experts.engine.kernels.cpu.products.byte_rows import LINE, called, spread
from mlx_experts.engine.kernels.cpu.products.rows import F32, I8, I32, I64, Lanes, blocks_of
from mlx_experts.engine.kernels.request import Decline, Projection

GROUP = 64  # inputs that share a scale
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # codes of a 32-bit word of 4-bit weights, low halves of its bytes first


def declines(projection: Projection) -> Decline | None:
    """Why a stack is multiplied with float32 inputs, or None."""
    p = projection
    wanted, hint = "affine 4- or 8-bit weights", "The layer runs with float32 activations."
    if p.format != "affine" or p.bits not in (4, 8):
        return Decline("int8_format", wanted, p.storage, hint)
    line = byte_rows.codes_of_line(p)
    if p.cols % line or p.group_size % GROUP:
        found = f"width {p.cols} in groups of {p.group_size}"
        return Decline("int8_width", f"a multiple of {line}, in groups of 64 or more", found, hint)
    if not native.has(*byte_rows.NEEDED):
        return Decline("int8_processor", "AVX-512 with VNNI", native.target()[0], hint)
    return None


def _quantised(builder: Any, lanes: Lanes, x: Any, first: Any) -> tuple[Any, Any]:
    """``GROUP`` inputs from ``first`` on as whole numbers in 32 bits, and their scale."""
    values = lanes.load(F32, x, first)
    size = called(builder, f"llvm.fabs.v{GROUP}f32", lanes.floats, values)
    most = called(builder, f"llvm.vector.reduce.fmax.v{GROUP}f32", F32, size)
    # What is no number, or infinite, must not look like one: it makes the scale NaN.
    nothing = builder.fmul(values, lanes.real(0.0), flags=())
    poison = lanes.total(nothing)
    scale = builder.fadd(builder.fdiv(most, F32(127.0)), poison, flags=())
    empty = builder.fcmp_unordered("==", most, F32(0.0))
    inverse = builder.select(empty, F32(0.0), builder.fdiv(F32(127.0), most))
    inverses = spread(builder, inverse, lanes.floats)
    rounded = called(builder, f"llvm.nearbyint.v{GROUP}f32", lanes.floats, builder.fmul(values, inverses))
    sound = builder.fcmp_ordered("==", poison, F32(0.0))
    safe = builder.select(sound, rounded, lanes.real(0.0))
    return builder.fptosi(safe, lanes.ints), scale


def quantise(projection: Projection) -> native.Native:
    """The compiled rounding of inputs for ``rows_product``.

    Returns:
        A function ``(x, first, count, out, sums, n)``: ``count`` float32 from address ``x``, whole groups,
        are the inputs ``first`` and following of a row; their bytes go to the row ``out``; ``sums`` receives
        for each of the row's ``n`` blocks the sum of what the bytes stand for, and behind those the scales.
    """
    blocks = blocks_of(projection)

    def write(builder: Any, arguments: list[Any]) -> None:
        x, first, count, out, sums, n = arguments
        lanes = Lanes(builder, GROUP)
        with cgutils.for_range(builder, builder.udiv(count, I64(GROUP))) as loop:
            skipped = builder.mul(loop.index, I64(GROUP))
            ints, scale = _quantised(builder, lanes, x, skipped)
            at = builder.add(first, skipped)
            line = builder.mul(builder.udiv(at, I64(2 * GROUP)), I64(2 * GROUP))
            if projection.bits == 4:
                # A line of weights has 128 codes: the low halves of its bytes, then the high ones.
                half = builder.udiv(builder.sub(at, line), I64(2))
                for odd in (0, 1):
                    part = lanes.pick(ints, list(range(odd, GROUP, 2)))
                    place = builder.add(builder.add(out, line), builder.add(half, I64(odd * LINE)))
                    _store_bytes(builder, part, place)
            else:
                _store_bytes(builder, ints, builder.add(out, at))
            total = ints
            while total.type.count * blocks.weights > GROUP:
                few = Lanes(builder, total.type.count)
                even, uneven = (few.pick(total, list(range(o, few.count, 2))) for o in (0, 1))
                total = builder.add(even, uneven)
            few = Lanes(builder, total.type.count)
            scales = spread(builder, scale, few.floats)
            block = builder.udiv(at, I64(blocks.weights))
            few.store(builder.fmul(builder.sitofp(total, few.floats), scales, flags=()), sums, block)
            few.store(scales, sums, builder.add(n, block))

    return native.function("int8_quantise", 6, write)


def _store_bytes(builder: Any, ints: Any, address: Any) -> None:
    kind = ir.VectorType(I8, ints.type.count)
    builder.store(builder.trunc(ints, kind), builder.inttoptr(address, kind.as_pointer()), align=1)


def rows_product(projection: Projection) -> native.Native:
    """The compiled product of rows with one rounded input; see ``byte_rows.rows_product``."""
    return byte_rows.rows_product(projection, 1, False)


def split(projection: Projection) -> native.Native:
    """The compiled rounding of one input for ``product``: as ``amx.split``, in one part.

    ``sums`` receives the sum and the scale of each group of ``GROUP``.
    """
    order = [8 * word + i for word in range(GROUP // 8) for i in _ORDER]

    def write(builder: Any, arguments: list[Any]) -> None:
        x, steps, inputs, out, sums = arguments
        lanes = Lanes(builder, GROUP)
        with cgutils.for_range(builder, steps) as loop:
            ints, scale = _quantised(builder, lanes, x, builder.mul(loop.index, I64(GROUP)))
            place = builder.add(out, builder.mul(loop.index, builder.mul(inputs, I64(LINE))))
            _store_bytes(builder, lanes.pick(ints, order) if projection.bits == 4 else ints, place)
            total = called(builder, f"llvm.vector.reduce.add.v{GROUP}i32", I32, ints)
            whole = builder.fmul(builder.sitofp(total, F32), scale, flags=())
            for i, value in enumerate((whole, scale)):
                at = builder.add(sums, builder.add(builder.mul(loop.index, I64(8)), I64(4 * i)))
                builder.store(value, builder.inttoptr(at, F32.as_pointer()), align=4)

    return native.function("int8_split", 5, write)


def product(projection: Projection) -> native.Native:
    """The compiled product of rows of weights with blocks of rounded inputs, as ``amx.product``."""

    def write(builder: Any, arguments: list[Any]) -> None:
        _Product(builder, projection, arguments).write()

    return native.function("int8_product", 13, write)


def functions(projection: Projection) -> amx.Functions:
    """What multiplies several rounded inputs on the matrix unit."""
    steps = projection.cols // GROUP
    return amx.Functions(split(projection), product(projection), steps * LINE, 2 * steps, steps)


class _Product(amx.Product):
    """Writes ``product``: one part of an input, groups of 64, whole numbers."""

    parts, step, instruction, numbers = 1, GROUP, "tdpbsud", 2

    @staticmethod
    def group_of(projection: Projection) -> int:
        return GROUP

    def pieces(self, words: list[Any]) -> list[Any]:
        """The codes of a word as groups of four bytes."""
        if self.projection.bits == 8:
            return words
        builder, lanes = self.builder, self.lanes
        parts = [words[0], builder.lshr(words[0], lanes.whole(4))]
        return [lanes.masked(part, 0x0F0F0F0F) for part in parts]

    def as_sums(self, words: Any) -> Any:
        return self.builder.sitofp(words, self.lanes.floats)
