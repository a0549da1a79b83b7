"""How numba compiles this folder's computations, and how they call machine code by its address."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def kept_on_disk(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """numba's compilation of a function, kept on disk where a folder for it can be written."""
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder, neither beside this file nor in the home folder
        return njit(**options)(function)


@dataclass(frozen=True)
class Forms:
    """The two compilations of one computation."""

    parallel: Callable[..., Any]
    serial: Callable[..., Any]


@lru_cache(maxsize=1)
def _edition() -> str:
    """What tells this folder's code from an earlier one: numba looks at the one file of a function only."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:8]


def both_forms(function: Any, **options: Any) -> Forms:
    """Both forms; numba files compiled code under the function's name, so they need two names."""

    def form(kind: str, parallel: bool) -> Callable[..., Any]:
        name = f"{function.__name__.removeprefix('_')}_{kind}_{_edition()}"
        code = function.__code__.replace(co_name=name, co_qualname=name)
        made = FunctionType(code, function.__globals__, name)
        made.__qualname__ = name
        return kept_on_disk(made, parallel=parallel, nogil=True, error_model="numpy", **options)

    return Forms(form("parallel", True), form("serial", False))


_FLOAT, _LONG = ir.FloatType(), ir.IntType(64)


@intrinsic
def read(typingctx: Any, address: Any, index: Any) -> Any:
    """The float32 at an index from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], _FLOAT.as_pointer()), [args[1]])
        return builder.load(pointer, align=4)

    return types.float32(types.int64, types.int64), codegen


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
