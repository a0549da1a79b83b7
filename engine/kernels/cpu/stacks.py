"""A stack of matrices as compiled code reads it, and arrays as it reads and writes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.expert_weights import Stack
from mlx_experts.engine.kernels.request import Activations, Decline, Projection

if TYPE_CHECKING:
    from mlx_experts.engine.kernels.cpu.products.amx import Functions


@lru_cache(maxsize=64)
def rows_function(projection: Projection) -> Any:
    """The compiled product of rows; a plan, which calls it by its address, holds it too."""
    from mlx_experts.engine.kernels.cpu.products.rows import rows_product

    return rows_product(projection)


@lru_cache(maxsize=64)
def digits_functions(projection: Projection, tail: bool) -> tuple[Any, Any]:
    """The split of an input into digits and the product of rows with those."""
    from mlx_experts.engine.kernels.cpu.products import digits

    return digits.quantise(projection), digits.rows_product(projection, tail)


@lru_cache(maxsize=64)
def decode_function(projection: Projection) -> Any:
    """The compiled decoder of rows."""
    from mlx_experts.engine.kernels.cpu.products.tiles import decode_rows

    return decode_rows(projection)


@lru_cache(maxsize=1)
def dot_function() -> Any:
    """The compiled product of decoded rows with inputs."""
    from mlx_experts.engine.kernels.cpu.products.tiles import dot_tile

    return dot_tile()


@lru_cache(maxsize=64)
def unit_functions(projection: Projection) -> Functions | None:
    """What multiplies on the processor's matrix unit; None where it has none for the format."""
    from mlx_experts.engine.kernels.cpu.products import amx

    return amx.functions(projection) if amx.available() and amx.takes(projection) else None


@lru_cache(maxsize=64)
def int8_functions(projection: Projection) -> tuple[Any, Any, Functions | None]:
    """Rounding and product of rows for 8-bit inputs, and what the matrix unit does with them."""
    from mlx_experts.engine.kernels.cpu import native
    from mlx_experts.engine.kernels.cpu.products import amx, int8

    on_unit = int8.functions(projection) if amx.available() and native.has("amx-int8") else None
    return int8.quantise(projection), int8.rows_product(projection), on_unit


def int8_declines(stack: Stack, activations: Activations) -> Decline | None:
    """Why a stack is multiplied with float32 inputs although 8-bit ones are asked for, or None."""
    if activations == "float32":
        return None
    from mlx_experts.engine.kernels.cpu.products import int8

    return int8.declines(stack.projection)


def tile_shapes() -> int:
    """The address of the shapes of the matrix unit's tiles."""
    from mlx_experts.engine.kernels.cpu.products import amx

    return int(amx.configurations().ctypes.data)


def kind_of(projection: Projection) -> Projection:
    """The part of a projection that the compiled code depends on."""
    return replace(projection, rows=0, cols=0, bias=False, global_scale=False)


def address(array: mx.array) -> int:
    """Where the data of an evaluated array without gaps lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


_BYTE_OF = ctypes.c_char.from_buffer


def addresses(arrays: Iterable[mx.array]) -> tuple[int, ...]:
    """As :func:`address` for each; asked at every call, so without a Python call for each array."""
    return tuple(map(ctypes.addressof, map(_BYTE_OF, arrays)))  # type: ignore[arg-type]


def float32(array: mx.array | None) -> np.ndarray:
    """A small array as float32; empty for None."""
    if array is None:
        return np.empty(0, np.float32)
    return np.ascontiguousarray(np.array(array.astype(mx.float32)))


def rows_of(array: mx.array) -> np.ndarray:
    """An evaluated array as a matrix of its last axis, copied only where it has gaps."""
    return np.ascontiguousarray(np.array(array, copy=False)).reshape(-1, array.shape[-1])


def held(*arrays: mx.array | None) -> list[mx.array]:
    """Second holders of arrays that were copied: MLX then puts a change in place elsewhere, as is noticed."""
    holders = [a[...] for a in arrays if a is not None]
    mx.eval(holders)
    return holders


def _as_floats(array: mx.array | None) -> np.ndarray:
    """A small array as float32, in its own place where it is that already; empty for None."""
    if array is None or array.dtype != mx.float32 or not memoryview(array).c_contiguous:  # type: ignore[arg-type]
        return float32(array)
    return np.array(array, copy=False)


@dataclass(frozen=True, eq=False)
class Plan:
    """One stack as the driver reads it, and what must stay alive while it may be called."""

    numbers: np.ndarray
    alive: tuple[Any, ...]
    on_unit: bool = False


def plan(stack: Stack, activations: Activations = "float32") -> Plan:
    """The numbers of the driver's legend for one stack.

    Args:
        activations: what inputs are multiplied as, where the format has both; see ``int8_declines``.
    """
    from mlx_experts.engine.kernels.cpu.products import amx, digits
    from mlx_experts.engine.kernels.cpu.products.rows import blocks_of
    from mlx_experts.engine.kernels.cpu.products.tiles import PADDING

    p = stack.projection
    quantise: Any = None
    if activations == "int8" and int8_declines(stack, activations) is None:
        quantise, function, unit = int8_functions(_kept(p))
    else:
        unit = unit_functions(_kept(p))
        if digits.takes(p):
            quantise, function = digits_functions(kind_of(p), digits.ends_within_a_line(p))
        else:
            function = rows_function(kind_of(p))
    as_stored = p.format == "plain" and p.dtype == "float32" and p.cols % PADDING == 0
    decode = None if as_stored else decode_function(kind_of(p))
    blocks = blocks_of(p)
    plane_scales = np.array(blocks.scales, np.float32)
    bias, scale = _as_floats(stack.bias), _as_floats(stack.global_scale)
    planes = (stack.weight, stack.scales, stack.biases)
    row_bytes = [0 if a is None else a.itemsize * a.shape[-1] for a in planes]
    begins = [
        0 if a is None else address(a) + stack.first * n for a, n in zip(planes, row_bytes, strict=True)
    ]
    numbers = [
        function.address,
        *begins,
        bias.ctypes.data + stack.first * bias.itemsize if bias.size else 0,
        scale.ctypes.data if scale.size else 0,
        plane_scales.ctypes.data,
        p.rows,
        p.cols // blocks.weights,
        blocks.weights,
        *row_bytes[:2],
        0 if decode is None else decode.address,
        -(-p.cols // PADDING) * PADDING,
    ]
    if unit is None:
        numbers += [0] * 6
    else:
        counts = [unit.steps, unit.input_bytes, unit.numbers, amx.scratch_bytes(p)]
        numbers += [unit.split.address, unit.product.address, *counts]
    numbers.append(0 if quantise is None else quantise.address)
    copied = held(stack.bias, stack.global_scale)
    alive = (function, decode, plane_scales, bias, scale, unit, quantise, *copied)
    return Plan(np.array(numbers, np.int64), alive, unit is not None)


def _kept(projection: Projection) -> Projection:
    """The part of a projection that code for a row of one width depends on."""
    return replace(projection, rows=0, bias=False, global_scale=False)


TRANSFORMED = Decline(
    "transformation",
    "a call outside compile, grad and vmap",
    "a call inside one",
    "The CPU kernels read values; leave the call out of the transformed function.",
)


def fresh(shape: tuple[int, ...]) -> np.ndarray:
    """Room for the output; tests fill it with NaN."""
    return np.empty(shape, np.float32)


def evaluated(*arrays: mx.array) -> bool:
    """Compute the arrays, or say False when MLX is only tracing them."""
    try:
        mx.async_eval(*arrays)
    except ValueError as error:
        if "graph transformation" not in str(error):
            raise
        return False
    mx.eval(*arrays)
    return True
