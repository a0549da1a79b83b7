"""What numba's compiled code does with addresses: memory, contexts, and calls of other machine code.

A context is a row of 64-bit words that a part (see ``numba_forms``) gets by its address; a float32 lies there
as its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mlx_experts.engine.kernels.cpu import native

_FLOAT, _LONG = ir.FloatType(), ir.IntType(64)


def bits(value: Any) -> int:
    """A float32 as a context keeps it; see ``as_float``."""
    return int(np.float32(value).view(np.uint32))


@intrinsic
def read(typingctx: Any, address: Any, index: Any) -> Any:
    """The float32 at an index from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _FLOAT.as_pointer()), [args[1]])
        return builder.load(pointer, align=4)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def write(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Put a float32 at an index from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _FLOAT.as_pointer()), [args[1]])
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


def _reader(type_: ir.Type, extend: str) -> Any:
    def read_whole(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.load(builder.gep(builder.inttoptr(args[0], type_.as_pointer()), [args[1]]))
            return found if type_ == _LONG else getattr(builder, extend)(found, _LONG)

        return types.int64(types.int64, types.int64), codegen

    return intrinsic(read_whole)


number, whole32, byte = _reader(_LONG, ""), _reader(ir.IntType(32), "sext"), _reader(ir.IntType(8), "zext")
"""The 64-bit, the signed 32-bit integer or the byte at an index from an address."""


@intrinsic
def store(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Put a 64-bit integer at an index from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(builder.inttoptr(args[0], _LONG.as_pointer()), [args[1]]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def store32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Put an integer as one of 32 bits at an index from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        place = builder.gep(builder.inttoptr(args[0], word.as_pointer()), [args[1]])
        builder.store(builder.trunc(args[2], word), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def counted_up(typingctx: Any, address: Any) -> Any:
    """Add one to the 64-bit integer at an address, for all threads at once; what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_LONG, 1), "seq_cst")

    return types.int64(types.int64), codegen


@intrinsic
def count_now(typingctx: Any, address: Any) -> Any:
    """The 64-bit integer at an address, which other threads change; waits a moment first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if native.is_x86():
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return builder.load_atomic(builder.inttoptr(args[0], _LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Where an array's data lies, for as long as the caller of the compiled function holds it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, _LONG)

    return types.int64(array), codegen


_LINE_BYTES = 64


def _allocator(zeros: bool) -> Any:
    def allocate(typingctx: Any, size: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def long(value: int) -> ir.Constant:
                return ir.Constant(_LONG, value)

            own = builder.add(args[0], long(_LINE_BYTES + 8))
            begin = builder.ptrtoint(context.nrt.allocate(builder, own), _LONG)
            at = builder.and_(builder.add(begin, long(_LINE_BYTES + 7)), long(-_LINE_BYTES))
            builder.store(begin, builder.inttoptr(builder.sub(at, long(8)), _LONG.as_pointer()))
            if zeros:
                cgutils.memset(builder, builder.inttoptr(at, ir.IntType(8).as_pointer()), args[0], 0)
            return at

        return types.int64(types.int64), codegen

    return intrinsic(allocate)


room, zeros = _allocator(False), _allocator(True)
"""The address of so many bytes, until ``release``.

They begin at a cache line, since a vector that straddles two costs twice.
"""


@intrinsic
def release(typingctx: Any, *rooms: Any) -> Any:
    """Give back what ``room`` and ``zeros`` gave."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for at in cgutils.unpack_tuple(builder, args[0]):
            begin = builder.inttoptr(builder.sub(at, ir.Constant(_LONG, 8)), _LONG.as_pointer())
            context.nrt.free(builder, builder.inttoptr(builder.load(begin), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.StarArgTuple.from_types(rooms)), codegen


@intrinsic
def packed(typingctx: Any, *values: Any) -> Any:
    """The address of a context of these integers and float32 numbers, until the caller returns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[0])
        at = cgutils.alloca_once(builder, _LONG, size=len(values))
        for i, (value, type_) in enumerate(zip(values, signature.args[0], strict=True)):
            if type_ == types.float32:
                value = builder.zext(builder.bitcast(value, ir.IntType(32)), _LONG)
            else:
                value = context.cast(builder, value, type_, types.int64)
            builder.store(value, builder.gep(at, [ir.Constant(_LONG, i)]))
        return builder.ptrtoint(at, _LONG)

    return types.int64(types.StarArgTuple.from_types(values)), codegen


@intrinsic(prefer_literal=True)
def unpacked(typingctx: Any, context: Any, count: Any) -> Any:
    """The first ``count`` numbers of a context, a literal; a float32 comes as its bits (``as_float``)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], _LONG.as_pointer())
        found = [builder.load(builder.gep(at, [ir.Constant(_LONG, i)])) for i in range(wanted)]
        return context.make_tuple(builder, signature.return_type, found)

    wanted = count.literal_value
    return types.UniTuple(types.int64, wanted)(types.int64, count), codegen


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 that ``packed`` kept."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), _FLOAT)

    return types.float32(types.int64), codegen


def _call(count: int) -> Any:
    """What an intrinsic returns that calls the machine code at its first argument with ``count`` integers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * count)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (count + 1)), codegen


@intrinsic
def call_part(typingctx: Any, part: Any, index: Any, context: Any) -> Any:
    """Call a part by its address."""

    return _call(2)


@intrinsic
def call_loop(typingctx: Any, loop: Any, part: Any, count: Any, context: Any) -> Any:
    """Call a part for each index below ``count``, by the loop at this address."""

    return _call(3)


@intrinsic
def call_rows(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    x: Any, sums: Any, n: Any, out: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``rows_product`` by address."""

    return _call(10)


@intrinsic
def call_decode(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    n: Any, out: Any, stride: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``decode_rows`` by address."""

    return _call(9)


@intrinsic
def call_dot(
    typingctx: Any, function: Any, w: Any, stride: Any, rows: Any, inputs: Any, outputs: Any, count: Any,
    offset: Any, length: Any, column: Any, add: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``dot_tile`` by address."""

    return _call(10)


@intrinsic
def call_quantise(
    typingctx: Any, function: Any, x: Any, first: Any, count: Any, out: Any, sums: Any, n: Any
) -> Any:
    """Call a compiled ``int8.quantise`` by address."""

    return _call(6)


@intrinsic
def call_activation(typingctx: Any, function: Any, g: Any, u: Any, alpha: Any, limit: Any) -> Any:
    """Call a compiled activation by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(_FLOAT, [_FLOAT] * 4)
        return builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])

    return types.float32(types.int64, *[types.float32] * 4), codegen


@intrinsic
def call_split(
    typingctx: Any, function: Any, x: Any, steps: Any, inputs: Any, out: Any, sums: Any
) -> Any:  # fmt: skip
    """Call a compiled ``amx.split`` by address."""

    return _call(5)


@intrinsic
def call_unit(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    inputs: Any, sums: Any, blocks: Any, tokens: Any, configs: Any, out: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``amx.product`` by address."""

    return _call(13)
