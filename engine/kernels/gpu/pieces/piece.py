"""A launch together with the arrays that stay, as a function of the arrays of one token.

Beside an H200, MLX's host takes about 8 µs for a launch, 1.5 µs more for each further input and 6 µs more for
each further output. Several outputs are therefore one array, of which each is a view (2 µs), and small
constants are one input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.gpu.joined import Joined, reading
from mlx_experts.engine.kernels.gpu.source import WARP, Backend, Launch, text
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
class Packed:
    """Several outputs in one array.

    Args:
        begins: of each output, in bytes.
        size: values of the array.
        dtype: of the array: that of the outputs, or float32 where they are of several types.
    """

    begins: Mapping[str, int]
    size: int
    dtype: mx.Dtype


def pack(outputs: Mapping[str, Output], device: Device) -> Packed | None:
    """How outputs share an array; None for a single one, and for several types outside CUDA."""
    dtypes = {output.dtype for output in outputs.values()}
    if len(outputs) < 2 or (len(dtypes) > 1 and device != "cuda"):
        return None
    begins, at = {}, 0
    for name, output in outputs.items():
        begins[name] = at
        at += -(-output.size * output.dtype.size // _ALIGNED) * _ALIGNED
    dtype = mx.float32 if len(dtypes) > 1 else dtypes.pop()
    return Packed(begins, at // dtype.size, dtype)


@dataclass(eq=False)
class Piece:
    """One launch of a layer.

    Args:
        held: every input of the launch by name; None for those that a call gives.
        outputs: each output by name, in order.
        packed: how they share an array, or None.
        options: passed to the launch, for tests.
    """

    backend: Backend
    launch: Launch
    held: Mapping[str, mx.array | None]
    outputs: Mapping[str, Output]
    packed: Packed | None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._made: dict[tuple[mx.Dtype, ...], Callable[..., list[mx.array]]] = {}

    @property
    def tokens(self) -> tuple[str, ...]:
        """The inputs that each call gives, in order."""
        return tuple(name for name, array in self.held.items() if array is None)

    def arrays(self, *token: mx.array) -> list[mx.array]:
        """Every input of the launch, in its order."""
        given = iter(token)
        return [next(given) if array is None else array for array in self.held.values()]

    def reading(self, joined: Sequence[Joined]) -> Piece:
        """This launch with its arrays found in joined ones."""
        launch, held = reading(self.launch, self.held, joined)
        return replace(self, launch=launch, held=held)

    def memory(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shape and type of each array that the launch writes."""
        if self.packed is None:
            return [(output.shape, output.dtype) for output in self.outputs.values()]
        return [((self.packed.size,), self.packed.dtype)]

    def views(self, made: Sequence[mx.array]) -> list[mx.array]:
        """The outputs in what the launch wrote."""
        if self.packed is None:
            return list(made)
        views = []
        for name, output in self.outputs.items():
            array = made[0] if output.dtype == self.packed.dtype else made[0].view(output.dtype)
            strides = [prod(output.shape[i + 1 :]) for i in range(len(output.shape))]
            begin = self.packed.begins[name] // output.dtype.size
            views.append(mx.as_strided(array, output.shape, strides, begin))
        return views

    def run(self, *token: mx.array) -> list[mx.array]:
        """What the launch writes for the arrays that ``tokens`` names: one array where outputs are packed."""
        arrays = self.arrays(*token)
        key = tuple(array.dtype for array in arrays)
        run = self._made.get(key)
        if run is None:
            memory = self.memory()
            dtypes = [*key, *(dtype for _, dtype in memory)]
            shapes = [shape for shape, _ in memory]
            run = self._made[key] = self.launch.make(self.backend, dtypes, shapes, **self.options)
        return run(arrays)

    def __call__(self, *token: mx.array) -> list[mx.array]:
        """The outputs for the arrays that ``tokens`` names."""
        return self.views(self.run(*token))


def output_text(outputs: Mapping[str, Output], packed: Packed | None) -> tuple[tuple[str, ...], str]:
    """Names of the arrays that a launch writes, and the statements that find each output in them."""
    if packed is None:
        return tuple(outputs), ""
    finds = []
    for name, output in outputs.items():
        place = f"out + {packed.begins[name] // packed.dtype.size}"
        if output.dtype != packed.dtype:
            place = f"reinterpret_cast<{CUDA_TYPES[output.dtype]}*>({place})"
        finds.append(f"const auto {name} = {place};\n")
    return ("out",), "".join(finds)


class Constants:
    """Small arrays that stay.

    Args:
        joined: they become one float32 input, which is computed here; otherwise each is an input as it is.
    """

    def __init__(self, joined: bool) -> None:
        self._joined, self._apart = joined, dict[str, mx.array]()
        self._parts: list[mx.array] = []
        self._size = 0

    def add(self, array: mx.array) -> str:
        """Keeps a vector and returns the C pointer to it."""
        if not self._joined:
            name = f"fixed{len(self._apart)}"
            self._apart[name] = array
            return name
        at, size = self._size, array.size
        room = -(-size // 8) * 8
        vector = array.reshape(-1).astype(mx.float32)
        self._parts += [vector, mx.zeros((room - size,))] if room > size else [vector]
        self._size += room
        return f"(fixed + {at})"

    def inputs(self) -> dict[str, mx.array]:
        """The inputs. A joined one has eight values or more, as Metal's address spaces want."""
        if not self._parts:
            return self._apart
        joined = mx.concatenate(self._parts)
        mx.eval(joined)
        return {"fixed": joined}


def device_text(device: Device) -> str:
    """What a piece needs from a GPU alone; Metal has no form of it."""
    return text("pieces/device.cu") if device == "cuda" else ""


def bounded(device: Device, warps: int) -> str:
    """CUDA's launch bounds, by way of the word that MLX writes before a kernel's name.

    Without them the compiler may take more registers than a block of this size has.
    """
    if device != "cuda":
        return ""
    bounds = f"__attribute__((global)) __attribute__((launch_bounds({warps * WARP})))"
    return f"#undef __global__\n#define __global__ {bounds}\n"
