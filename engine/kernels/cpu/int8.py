"""Products of packed weights with inputs rounded to 8-bit integers: a declared choice, not float32-exact.

Every ``GROUP`` neighbours of an input share a scale, their largest magnitude over 127, as llama.cpp's Q8_0
has it for 32. The products are whole numbers and are scaled as float32. A single input goes through
AVX-512's dot products of bytes (VNNI), several through the tiles of ``amx``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mlx_experts.engine.kernels.cpu import amx, native
from mlx_experts.engine.kernels.cpu.rows import (
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
from mlx_experts.engine.kernels.request import Decline, Projection

GROUP = 64  # inputs that share a scale
_LINE = 64  # bytes
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # codes of a 32-bit word of 4-bit weights, low halves of its bytes first


def declines(projection: Projection) -> Decline | None:
    """Why a stack is multiplied with float32 inputs, or None."""
    p = projection
    wanted, hint = "affine 4- or 8-bit weights", "The layer runs with float32 activations."
    if p.format != "affine" or p.bits not in (4, 8):
        return Decline("int8_format", wanted, p.storage, hint)
    line = _LINE * 8 // p.bits
    if p.cols % line or p.group_size % GROUP:
        found = f"width {p.cols} in groups of {p.group_size}"
        return Decline("int8_width", f"a multiple of {line}, in groups of 64 or more", found, hint)
    if not native.has("avx512vnni", "avx512bw", "avx512vl"):
        return Decline("int8_processor", "AVX-512 with VNNI", native.target()[0], hint)
    return None


def _called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _quantised(builder: Any, lanes: Lanes, x: Any, first: Any) -> tuple[Any, Any]:
    """``GROUP`` inputs from ``first`` on as whole numbers in 32 bits, and their scale."""
    values = lanes.load(F32, x, first)
    size = _called(builder, f"llvm.fabs.v{GROUP}f32", lanes.floats, values)
    most = _called(builder, f"llvm.vector.reduce.fmax.v{GROUP}f32", F32, size)
    # What is no number, or infinite, must not look like one: it makes the scale NaN.
    nothing = builder.fmul(values, lanes.real(0.0), flags=())
    poison = lanes.total(nothing)
    scale = builder.fadd(builder.fdiv(most, F32(127.0)), poison, flags=())
    empty = builder.fcmp_unordered("==", most, F32(0.0))
    inverse = builder.select(empty, F32(0.0), builder.fdiv(F32(127.0), most))
    spread = _spread(builder, inverse, lanes.floats)
    rounded = _called(builder, f"llvm.nearbyint.v{GROUP}f32", lanes.floats, builder.fmul(values, spread))
    sound = builder.fcmp_ordered("==", poison, F32(0.0))
    safe = builder.select(sound, rounded, lanes.real(0.0))
    return builder.fptosi(safe, lanes.ints), scale


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


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
                    place = builder.add(builder.add(out, line), builder.add(half, I64(odd * _LINE)))
                    _store_bytes(builder, part, place)
            else:
                _store_bytes(builder, ints, builder.add(out, at))
            total = ints
            while total.type.count * blocks.weights > GROUP:
                few = Lanes(builder, total.type.count)
                even, uneven = (few.pick(total, list(range(o, few.count, 2))) for o in (0, 1))
                total = builder.add(even, uneven)
            few = Lanes(builder, total.type.count)
            scales = _spread(builder, scale, few.floats)
            block = builder.udiv(at, I64(blocks.weights))
            few.store(builder.fmul(builder.sitofp(total, few.floats), scales, flags=()), sums, block)
            few.store(scales, sums, builder.add(n, block))

    return native.function("int8_quantise", 6, write)


def _store_bytes(builder: Any, ints: Any, address: Any) -> None:
    kind = ir.VectorType(I8, ints.type.count)
    builder.store(builder.trunc(ints, kind), builder.inttoptr(address, kind.as_pointer()), align=1)


def rows_product(projection: Projection) -> native.Native:
    """The compiled product of rows with one rounded input.

    Returns:
        A function as ``rows.rows_product`` describes, with ``x`` and ``sums`` as ``quantise`` writes them.
    """

    def write(builder: Any, arguments: list[Any]) -> None:
        w, s, b, row_bytes, scale_bytes, count, x, sums, n, out = arguments
        steps = builder.udiv(count, I64(ROWS))
        done = builder.mul(steps, I64(ROWS))

        def rows_from(row: Any, together: int) -> None:
            at = builder.mul(row, scale_bytes)
            rows = []
            for r in range(together):
                far = builder.mul(scale_bytes, I64(r))
                weights = builder.add(w, builder.mul(builder.add(row, I64(r)), row_bytes))
                rows.append((weights, *(builder.add(builder.add(a, at), far) for a in (s, b))))
            target = builder.add(out, builder.mul(row, I64(4)))
            _rows(builder, projection, rows, x, sums, n, target)

        with cgutils.for_range(builder, steps) as loop:
            rows_from(builder.mul(loop.index, I64(ROWS)), ROWS)
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            rows_from(builder.add(loop.index, done), 1)

    return native.function("int8_rows", 10, write)


def _rows(builder: Any, projection: Projection, rows: list[Any], x: Any, sums: Any, n: Any, out: Any) -> None:
    """Products of some rows, a line of 64 bytes of each at a time; a lane is a block."""
    lanes, blocks = Lanes(builder, 16), blocks_of(projection)
    per_group = projection.group_size // blocks.weights
    line = ir.VectorType(I8, _LINE)
    held = [cgutils.alloca_once(builder, lanes.floats) for _ in rows]
    for place in held:
        builder.store(lanes.real(0.0), place)

    def bytes_at(address: Any) -> Any:
        return builder.load(builder.inttoptr(address, line.as_pointer()), align=1)

    def products(sum_: Any, codes: Any, inputs: Any) -> Any:
        return _called(builder, "llvm.x86.avx512.vpdpbusd.512", lanes.ints, sum_, codes, inputs)

    with cgutils.for_range(builder, builder.udiv(n, I64(16))) as loop:
        block, skipped = builder.mul(loop.index, I64(16)), builder.mul(loop.index, I64(_LINE))
        for weights, _, _ in rows:
            prefetch(builder, builder.add(weights, builder.add(skipped, I64(AHEAD))))
        scales, totals = lanes.load(F32, sums, builder.add(n, block)), lanes.load(F32, sums, block)
        if projection.bits == 4:
            begin = builder.add(x, builder.mul(skipped, I64(2)))
            inputs = [bytes_at(begin), bytes_at(builder.add(begin, I64(_LINE)))]
        else:
            inputs = [bytes_at(builder.add(x, skipped))]
        for place, (weights, s, b) in zip(held, rows, strict=True):
            codes = [bytes_at(builder.add(weights, skipped))]
            if projection.bits == 4:
                words = builder.bitcast(codes[0], lanes.ints)
                parts = [words, builder.lshr(words, lanes.whole(4))]
                codes = [builder.bitcast(lanes.masked(p, 0x0F0F0F0F), line) for p in parts]
            sum_ = lanes.whole(0)
            for code, some in zip(codes, inputs, strict=True):
                sum_ = products(sum_, code, some)

            def scale(few: Lanes, group: Any, at: Any = s) -> Any:
                return few.stored_floats(projection.dtype, at, group)

            def bias(few: Lanes, group: Any, at: Any = b) -> Any:
                return few.stored_floats(projection.dtype, at, group)

            factor = builder.fmul(for_each_block(lanes, per_group, block, scale), scales)
            part = builder.fmul(builder.sitofp(sum_, lanes.floats), factor)
            shift = builder.fmul(for_each_block(lanes, per_group, block, bias), totals)
            builder.store(builder.fadd(builder.load(place), builder.fadd(part, shift)), place)
    for r, place in enumerate(held):
        at = builder.inttoptr(builder.add(out, I64(4 * r)), F32.as_pointer())
        builder.store(lanes.total(builder.load(place)), at, align=4)


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
            place = builder.add(out, builder.mul(loop.index, builder.mul(inputs, I64(_LINE))))
            _store_bytes(builder, lanes.pick(ints, order) if projection.bits == 4 else ints, place)
            total = _called(builder, f"llvm.vector.reduce.add.v{GROUP}i32", I32, ints)
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
    return amx.Functions(split(projection), product(projection), steps * _LINE, 2 * steps, steps)


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
