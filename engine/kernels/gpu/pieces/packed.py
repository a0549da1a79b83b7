"""Several outputs of a launch in one array, and how the launch that reads them next finds them there.

Beside an H200, MLX's host takes about 6 µs for each further output of a launch, 2 µs for each view of an
array and 1.5 µs for each further input. A value is therefore handed on with its array and its place in it,
and gets a view only where MLX itself reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx

from mlx_experts.engine.kernels.request import Device

# Bytes: outputs begin at multiples of it, so that they can be read in whole vectors.
_ALIGNED = 16
CUDA_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "unsigned int",
}


@dataclass(frozen=True)
class Output:
    """One output.

    Args:
        shape: what a call returns; the memory is a row.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def size(self) -> int:
        """Values."""
        return prod(self.shape)

    @classmethod
    def row(cls, size: int, dtype: mx.Dtype) -> Output:
        """A row of values."""
        return cls((1, 1, size), dtype)


@dataclass(frozen=True)
class Place:
    """Where an output lies in a packed array.

    Args:
        begin: its first byte.
        dtype: of the array.
    """

    output: Output
    begin: int
    dtype: mx.Dtype

    def found(self, name: str, array: str, const: str = "const ") -> str:
        """The statement that finds the output in an array, by the names of both."""
        place = f"{array} + {self.begin // self.dtype.size}"
        if self.output.dtype != self.dtype:
            place = f"reinterpret_cast<{const}{CUDA_TYPES[self.output.dtype]}*>({place})"
        return f"auto {name} = {place};\n"


@dataclass(frozen=True)
class Packed:
    """Several outputs in one array.

    Args:
        places: of each output by name.
        size: values of the array.
        dtype: of the array: that of the outputs, or float32 where they are of several types.
    """

    places: Mapping[str, Place]
    size: int
    dtype: mx.Dtype


@dataclass(frozen=True, eq=False)
class PackedValue:
    """An output where a launch left it.

    Args:
        array: the launch's whole array.
        place: where in it.
    """

    array: mx.array
    place: Place

    @cached_property
    def view(self) -> mx.array:
        """The value as an array of its own, for MLX."""
        output = self.place.output
        array = self.array if output.dtype == self.array.dtype else self.array.view(output.dtype)
        strides = [prod(output.shape[i + 1 :]) for i in range(len(output.shape))]
        return mx.as_strided(array, output.shape, strides, self.place.begin // output.dtype.size)

    def part(self, first: int, size: int) -> PackedValue:
        """Some values of it as a row of their own, which begins at a whole value of the array."""
        place = self.place
        begin = place.begin + first * place.output.dtype.size
        assert begin % place.dtype.size == 0
        return PackedValue(self.array, Place(Output.row(size, place.output.dtype), begin, place.dtype))


Value = mx.array | PackedValue


def viewed(value: Value) -> mx.array:
    """A value as MLX reads it."""
    return value.view if isinstance(value, PackedValue) else value


def filled(like: Sequence[Value], values: Sequence[mx.array]) -> list[Value]:
    """Values that lie as others do, in arrays of their own; what is between them is zero."""
    parts: dict[int, list[tuple[Place, mx.array]]] = {}
    for value, array in zip(like, values, strict=True):
        if isinstance(value, PackedValue):
            parts.setdefault(id(value.array), []).append(
                (value.place, array.astype(value.place.output.dtype))
            )
    arrays = {}
    for value in like:
        if isinstance(value, PackedValue) and id(value.array) not in arrays:
            arrays[id(value.array)] = _laid(parts[id(value.array)], value.array)
    return [
        PackedValue(arrays[id(value.array)], value.place) if isinstance(value, PackedValue) else array
        for value, array in zip(like, values, strict=True)
    ]


def _laid(parts: Sequence[tuple[Place, mx.array]], like: mx.array) -> mx.array:
    """An array of the size and type of another, with values at their places."""
    pieces, at = [], 0
    for place, array in sorted(parts, key=lambda part: part[0].begin):
        pieces += [mx.zeros((place.begin - at,), mx.uint8), array.reshape(-1).view(mx.uint8)]
        at = place.begin + array.nbytes
    pieces.append(mx.zeros((like.nbytes - at,), mx.uint8))
    return mx.concatenate(pieces).view(like.dtype)


def pack(outputs: Mapping[str, Output], device: Device) -> Packed | None:
    """How outputs share an array; None for a single one, and for several types outside CUDA."""
    dtypes = {output.dtype for output in outputs.values()}
    if len(outputs) < 2 or (len(dtypes) > 1 and device != "cuda"):
        return None
    dtype = mx.float32 if len(dtypes) > 1 else dtypes.pop()
    places, at = {}, 0
    for name, output in outputs.items():
        places[name] = Place(output, at, dtype)
        at += -(-output.size * output.dtype.size // _ALIGNED) * _ALIGNED
    return Packed(places, at // dtype.size, dtype)


def laid(values: Mapping[str, mx.array], device: Device) -> dict[str, Value]:
    """Values by name as a launch for that device leaves them, in one array where it has one."""
    packed = pack({name: Output(value.shape, value.dtype) for name, value in values.items()}, device)
    if packed is None:
        return dict(values)
    empty = mx.zeros((packed.size,), packed.dtype)
    places = [PackedValue(empty, place) for place in packed.places.values()]
    return dict(zip(values, filled(places, list(values.values())), strict=True))


def output_text(outputs: Mapping[str, Output], packed: Packed | None) -> tuple[tuple[str, ...], str]:
    """Names of the arrays that a launch writes, and the statements that find each output in them."""
    if packed is None:
        return tuple(outputs), ""
    return ("out",), "".join(place.found(name, "out", "") for name, place in packed.places.items())
