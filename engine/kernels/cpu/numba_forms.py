"""How numba compiles this folder's computations, and how they call machine code by its address."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, prange, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from mlx_experts.engine.kernels.cpu import native, start


def kept_on_disk(function: Callable[..., Any], **options: Any) -> Any:
    """numba's compilation of a function, kept on disk where a folder for it can be written."""
    function = _named(function)
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder, neither beside this file nor in the home folder
        return njit(**options)(function)


@lru_cache(maxsize=1)
def _edition() -> str:
    """What tells this folder's code from an earlier one: numba looks at the one file of a function only."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:8]


def _named(function: Any) -> Any:
    """The function under a name of its own for each edition: numba files compiled code under the name."""
    name = f"{function.__name__.removeprefix('_')}_{_edition()}"
    made = FunctionType(function.__code__.replace(co_name=name, co_qualname=name), function.__globals__, name)
    made.__module__, made.__qualname__ = function.__module__, name
    return made


def on_disk(function: Callable[..., Any]) -> bool:
    """Whether numba has kept code of a function, named for this edition."""
    try:
        folder = Path(FunctionCache(function).cache_path)
    except RuntimeError:  # as in ``kept_on_disk``
        return False
    module = function.__module__.rpartition(".")[2]
    return any(folder.glob(f"{module}.{function.__qualname__}-*.nbc"))


class Part:
    """A function of integers without a result that compiled code calls by its address.

    Args:
        function: what is compiled, when it is first asked for.
        count: its arguments.
        options: numba's.
    """

    def __init__(self, function: Callable[..., Any], count: int = 2, **options: Any) -> None:
        self.function = _named(function)
        self._signature = types.void(*[types.int64] * count)
        self._options = {"error_model": "numpy", **options}

    @cached_property
    def address(self) -> int:
        """Where its code lies, as long as the process lasts."""
        start.wait_for(self.function)
        try:
            made = cfunc(self._signature, cache=True, **self._options)(self.function)
        except RuntimeError:  # as in ``kept_on_disk``
            made = cfunc(self._signature, **self._options)(self.function)
        _HELD.append(made)
        return int(made.address)


# Two threads may ask for one part at once, and both keep its address.
_HELD: list[Any] = []


def _one_by_one(part, count, context):  # type: ignore[no-untyped-def]
    for index in range(count):
        call_part(part, index, context)


def _on_threads(part, count, context):  # type: ignore[no-untyped-def]
    for index in prange(count):
        call_part(part, index, context)


ONE_BY_ONE, ON_THREADS = Part(_one_by_one, 3), Part(_on_threads, 3, parallel=True)
"""Both call ``part(index, context)`` for each index below ``count``."""


@lru_cache(maxsize=1)
def one_by_one() -> Any:
    """``ONE_BY_ONE`` for callers in Python, who give addresses: of a part, how often, and of a context."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(ONE_BY_ONE.address)


def bits(value: Any) -> int:
    """A float32 as a context keeps it; see ``as_float``."""
    return int(np.float32(value).view(np.uint32))


class Forms:
    """One computation, whose loops run one by one or on all threads.

    Each loop's body is a part: a function of its index and of the address of a context. So numba compiles
    everything once, and what a loop runs on is one small function for all computations.

    Args:
        function: what is called; its first arguments are the address of a loop and those of the parts.
        parts: the bodies of its loops.
        options: numba's, for the parts that are functions.
    """

    def __init__(
        self, function: Callable[..., Any], *parts: Callable[..., Any] | Part, **options: Any
    ) -> None:
        self.function = kept_on_disk(function, nogil=True, error_model="numpy")
        self.parts = tuple(part if isinstance(part, Part) else Part(part, **options) for part in parts)

    def compiled(self, arguments: tuple[Any, ...]) -> None:
        """Compile everything for arguments of these numba types, and keep it on disk."""
        addresses = [ON_THREADS.address, ONE_BY_ONE.address, *(part.address for part in self.parts)]
        self.function.compile((*[types.int64] * (len(addresses) - 1), *arguments))

    @cached_property
    def parallel(self) -> Callable[..., Any]:
        """The computation on all threads."""
        return self._by(ON_THREADS)

    @cached_property
    def serial(self) -> Callable[..., Any]:
        """The computation on the caller's thread."""
        return self._by(ONE_BY_ONE)

    def _by(self, loop: Part) -> Callable[..., Any]:
        addresses = [part.address for part in (loop, *self.parts)]
        start.wait_for(self.function.py_func)
        return partial(self.function, *addresses)


_FLOAT, _LONG = ir.FloatType(), ir.IntType(64)


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


@intrinsic
def call_part(typingctx: Any, part: Any, index: Any, context: Any) -> Any:
    """Call a part by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 2)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def call_loop(typingctx: Any, loop: Any, part: Any, count: Any, context: Any) -> Any:
    """Call a part for each index below ``count``, by the loop at this address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 3)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def call_rows(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    x: Any, sums: Any, n: Any, out: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``rows_product`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 10)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def call_decode(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    n: Any, out: Any, stride: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``decode_rows`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 9)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


@intrinsic
def call_dot(
    typingctx: Any, function: Any, w: Any, stride: Any, rows: Any, inputs: Any, outputs: Any, count: Any,
    offset: Any, length: Any, column: Any, add: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``dot_tile`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 10)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def call_quantise(
    typingctx: Any, function: Any, x: Any, first: Any, count: Any, out: Any, sums: Any, n: Any
) -> Any:
    """Call a compiled ``int8.quantise`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 6)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


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

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 5)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def call_unit(
    typingctx: Any, function: Any, w: Any, s: Any, b: Any, row_bytes: Any, scale_bytes: Any, count: Any,
    inputs: Any, sums: Any, blocks: Any, tokens: Any, configs: Any, out: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Call a compiled ``amx.product`` by address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_ = ir.FunctionType(ir.VoidType(), [_LONG] * 13)
        builder.call(builder.inttoptr(args[0], type_.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), codegen
