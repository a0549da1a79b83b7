"""One row of a stack times a vector, compiled by numba for each storage format; no arrays, only addresses.

A *block* is the fewest whole 32-bit words that hold whole weights: 8 weights in a word at 4 bits, 32 in
3 words at 3 bits. Input ``i * P + p`` is kept at ``p * n + i`` (P weights a block, n blocks a row), so that
one position of consecutive blocks meets consecutive inputs and the loop over blocks becomes vector code.
A weight that lies below a word's top bit is masked and not shifted: the power of two it is too large by
is divided out of the input (``plane_scales``), which is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from mlx_experts.engine.kernels.facts import Projection

# Sums may be reordered into vector lanes; infinities and NaNs keep their meaning.
FLAGS = {"reassoc", "contract", "nsz"}

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

_ROW = types.float32(*[types.int64] * 7)


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
    count = 32 // common
    shifts = [_masked_shift(p * bits % 32, bits) for p in range(count)]
    return Blocks(count, bits // common, tuple(2.0**-s for s in shifts))


def _masked_shift(start: int, bits: int) -> int:
    """The shift that is left in the value when a field starting at this bit is only masked."""
    return start if start + bits < 32 else 0


def _load(builder: Any, type_: ir.Type, address: Any, index: Any) -> Any:
    pointer = builder.gep(builder.inttoptr(address, type_.as_pointer()), [index])
    width = 4 if type_ is _F32 else type_.width // 8
    return builder.load(pointer, align=width)


def _reader(type_: ir.Type, result: Any) -> Any:
    @intrinsic
    def read(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _load(builder, type_, *args)

        return result(types.int64, types.int64), codegen

    return read


read_f32 = _reader(_F32, types.float32)


@intrinsic
def write_f32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Store one float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _F32.as_pointer()), [args[1]])
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _signed(builder: Any, magnitude: Any, sign: Any) -> Any:
    """A float with the sign bit of ``sign``."""
    return builder.bitcast(builder.or_(builder.bitcast(magnitude, _I32), sign), _F32)


def _small_float(builder: Any, raw: Any, bias: int) -> Any:
    """A float narrower than float32 from its bits without the sign, moved to float32's mantissa.

    A zero exponent is read as if it were one and the leading one is taken off again, so that no float32
    subnormal occurs: processors are slow on those, or set to drop them.
    """
    zero_exponent = builder.icmp_unsigned("<", raw, _constant(1 << 23))
    placed = builder.add(raw, _constant((127 - bias) << 23))
    normal = builder.bitcast(placed, _F32)
    raised = builder.bitcast(builder.add(placed, _constant(1 << 23)), _F32)
    subnormal = builder.fsub(raised, ir.Constant(_F32, 2.0 ** (1 - bias)))
    return builder.select(zero_exponent, subnormal, normal)


def _from_e4m3(builder: Any, byte: Any) -> Any:
    """An 8-bit float (4 exponent, 3 mantissa bits) held in the low bits of ``byte``."""
    raw = builder.shl(builder.and_(byte, _constant(0x7F)), _constant(20))
    sign = builder.shl(builder.and_(byte, _constant(0x80)), _constant(24))
    is_nan = builder.icmp_unsigned("==", raw, _constant(0x7F << 20))
    value = builder.select(is_nan, ir.Constant(_F32, math.nan), _small_float(builder, raw, 7))
    return _signed(builder, value, sign)


def _from_f16(builder: Any, half: Any) -> Any:
    """An IEEE half held in the low bits of ``half``."""
    raw = builder.shl(builder.and_(half, _constant(0x7FFF)), _constant(13))
    sign = builder.shl(builder.and_(half, _constant(0x8000)), _constant(16))
    finite = builder.bitcast(_small_float(builder, raw, 15), _I32)
    special = builder.or_(raw, _constant(0x7F800000))
    is_special = builder.icmp_unsigned(">=", raw, _constant(31 << 23))
    return _signed(builder, builder.bitcast(builder.select(is_special, special, finite), _F32), sign)


def _from_bf16(builder: Any, half: Any) -> Any:
    return builder.bitcast(builder.shl(half, _constant(16)), _F32)


def _from_e8m0(builder: Any, byte: Any) -> Any:
    """A power of two; byte 0 is 2**-127, which has no normal float32."""
    normal = builder.shl(byte, _constant(23))
    return builder.bitcast(
        builder.select(builder.icmp_unsigned("==", byte, _constant(0)), _constant(1 << 22), normal), _F32
    )


def _float_at(builder: Any, dtype: str, address: Any, index: Any) -> Any:
    """A scale, a bias or a plain weight as float32."""
    if dtype == "float32":
        return _load(builder, _F32, address, index)
    half = builder.zext(_load(builder, _I16, address, index), _I32)
    return _from_bf16(builder, half) if dtype == "bfloat16" else _from_f16(builder, half)


def _scale_at(builder: Any, projection: Projection, address: Any, index: Any) -> Any:
    if projection.format == "affine":
        return _float_at(builder, projection.dtype, address, index)
    byte = builder.zext(_load(builder, ir.IntType(8), address, index), _I32)
    return _from_e4m3(builder, byte) if projection.format == "nvfp4" else _from_e8m0(builder, byte)


def _affine_fields(builder: Any, bits: int, words: list[Any]) -> list[Any]:
    """The integers of one block as float32, those that ``_masked_shift`` names still shifted."""
    mask = (1 << bits) - 1
    values = []
    for start in range(0, 32 * len(words), bits):
        word, shift = words[start // 32], start % 32
        if shift + bits < 32:
            field = builder.and_(word, _constant(mask << shift))
        else:
            field = builder.lshr(word, _constant(shift))
            if shift + bits > 32:
                rest = builder.shl(words[start // 32 + 1], _constant(32 - shift))
                field = builder.and_(builder.or_(field, rest), _constant(mask))
        values.append(builder.uitofp(field, _F32))
    return values


def _e2m1_fields(builder: Any, word: Any) -> list[Any]:
    """Twice the value of the eight 4-bit floats of a word: 0 1 2 3 4 6 8 12 and their negatives."""
    values = []
    for position in range(8):
        nibble = builder.lshr(word, _constant(4 * position))
        entry = builder.shl(builder.and_(nibble, _constant(7)), _constant(2))
        magnitude = builder.and_(builder.lshr(_constant(0xC8643210), entry), _constant(15))
        sign = builder.shl(builder.and_(nibble, _constant(8)), _constant(28))
        values.append(_signed(builder, builder.uitofp(magnitude, _F32), sign))
    return values


def _block_values(builder: Any, projection: Projection, address: Any, index: Any) -> list[Any]:
    """The P values of block ``index`` of a row."""
    if projection.format == "plain":
        return [_float_at(builder, projection.dtype, address, index)]
    count = blocks_of(projection).words
    first = builder.mul(index, ir.Constant(_I64, count))
    words = [_load(builder, _I32, address, builder.add(first, ir.Constant(_I64, j))) for j in range(count)]
    if projection.format == "affine":
        return _affine_fields(builder, projection.bits, words)
    if projection.format == "mxfp8":
        return [_from_e4m3(builder, builder.lshr(words[0], _constant(8 * p))) for p in range(4)]
    return _e2m1_fields(builder, words[0])


def row_product(projection: Projection) -> Any:
    """The compiled product of one row with a vector; takes about a tenth of a second to compile.

    Returns:
        A C function ``(weights, scales, biases, x, sums, n, scratch) -> float32``. All but ``n`` (blocks a
        row) are addresses: of the row's packed weights, its scales and biases, the input by position, the
        input's sum for each group, and room for n floats.
    """
    grouped = projection.format != "plain"
    affine = projection.format == "affine"
    per_group = max(projection.group_size // blocks_of(projection).weights, 1)

    @intrinsic
    def block_product(typingctx: Any, weights: Any, x: Any, n: Any, i: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, x, n, i = args
            total = None
            for p, value in enumerate(_block_values(builder, projection, address, i)):
                at = builder.add(builder.mul(n, ir.Constant(_I64, p)), i)
                product = builder.fmul(value, _load(builder, _F32, x, at))
                total = product if total is None else builder.fadd(total, product)
            return total

        return types.float32(*[types.int64] * 4), codegen

    @intrinsic
    def scale(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _scale_at(builder, projection, *args)

        return types.float32(types.int64, types.int64), codegen

    def product(weights, scales, biases, x, sums, n, scratch):  # type: ignore[no-untyped-def]
        total = types.float32(0)
        if affine:
            for g in range(n // per_group):
                total += scale(biases, g) * read_f32(sums, g)
        if grouped:
            for g in range(n // per_group):
                s = scale(scales, g)
                for j in range(per_group):
                    write_f32(scratch, g * per_group + j, s)
            for i in range(n):
                total += read_f32(scratch, i) * block_product(weights, x, n, i)
        else:
            for i in range(n):
                total += block_product(weights, x, n, i)
        return total

    return cfunc(_ROW, fastmath=FLAGS, error_model="numpy")(product)
