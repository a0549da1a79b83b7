"""A launch together with the arrays that stay, as a function of the arrays of one token.

Small constants are one input, for MLX's host takes 1.5 µs for each further one beside an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.gpu import source
from mlx_experts.engine.kernels.gpu.joined import Joined, reading
from mlx_experts.engine.kernels.gpu.pieces.packed import Output, Packed, PackedValue, Place, Value, viewed
from mlx_experts.engine.kernels.gpu.source import Backend, Launch, text
from mlx_experts.engine.kernels.request import Device

# How a launch reads one input of a token: a type, or an array by its number and the place in it.
_How = mx.Dtype | tuple[int, Place]


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
        self._made: dict[tuple[_How, ...], Callable[..., list[mx.array]]] = {}

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

    def values(self, made: Sequence[mx.array]) -> list[Value]:
        """The outputs where the launch left them."""
        if self.packed is None:
            return list(made)
        return [PackedValue(made[0], place) for place in self.packed.places.values()]

    def views(self, made: Sequence[mx.array]) -> list[mx.array]:
        """The outputs in what the launch wrote."""
        return [viewed(value) for value in self.values(made)]

    def run(self, *token: Value) -> list[mx.array]:
        """What the launch writes for what ``tokens`` names: one array where outputs are packed.

        A value that lies in another launch's array is read there; several of one array are one input.
        """
        hows, given = _parted(token)
        run = self._made.get(hows)
        if run is None:
            launch, dtypes = self._finding(hows)
            memory = self.memory()
            dtypes += [dtype for _, dtype in memory]
            shapes = [shape for shape, _ in memory]
            run = self._made[hows] = launch.make(self.backend, dtypes, shapes, **self.options)
        return run([*given, *self._fixed()])

    def prepared(self, *token: Value) -> tuple[Launch, list[mx.array]]:
        """The launch for these values, and all its inputs."""
        hows, given = _parted(token)
        return self._finding(hows)[0], [*given, *self._fixed()]

    def _fixed(self) -> list[mx.array]:
        return [array for array in self.held.values() if array is not None]

    def _finding(self, hows: Sequence[_How]) -> tuple[Launch, list[mx.Dtype]]:
        """The launch that reads its token so, and the types of its inputs."""
        names: dict[str, mx.Dtype] = {}
        finds = ""
        for name, how in zip(self.tokens, hows, strict=True):
            if isinstance(how, tuple):
                number, place = how
                names[f"me_packed{number}"] = place.dtype
                finds += place.found(name, f"me_packed{number}")
            else:
                names[name] = how
        held = [name for name, array in self.held.items() if array is not None]
        launch = replace(self.launch, inputs=(*names, *held), source=finds + self.launch.source)
        return launch, [*names.values(), *(array.dtype for array in self._fixed())]

    def left(self, *token: Value) -> dict[str, Value]:
        """The outputs by name, where the launch left them."""
        return dict(zip(self.outputs, self.values(self.run(*token)), strict=True))

    def __call__(self, *token: Value) -> list[mx.array]:
        """The outputs for what ``tokens`` names, each as an array of its own."""
        return self.views(self.run(*token))


def _parted(token: Sequence[Value]) -> tuple[tuple[_How, ...], list[mx.array]]:
    """How each value of a token is read, and the arrays that hold them, each once."""
    given: list[mx.array] = []
    hows: list[_How] = []
    numbers: dict[int, int] = {}
    for value in token:
        if isinstance(value, PackedValue):
            if id(value.array) not in numbers:
                numbers[id(value.array)] = len(numbers)
                given.append(value.array)
            hows.append((numbers[id(value.array)], value.place))
        else:
            given.append(value)
            hows.append(value.dtype)
    return tuple(hows), given


class Constants:
    """Small arrays that stay.

    Args:
        join: they become one float32 input, which is computed here; otherwise each is an input as it is.
        joined: what lies in one of these stays there.
    """

    def __init__(self, join: bool, joined: Sequence[Joined] = ()) -> None:
        self._join, self._apart = join, dict[str, mx.array]()
        self._lies = {place for each in joined for place in each.begins}
        self._parts: list[mx.array] = []
        self._size = 0

    def add(self, array: mx.array) -> str:
        """Keeps a vector and returns the C pointer to it."""
        if not self._join or id(array) in self._lies:
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
        fixed = mx.concatenate(self._parts)
        mx.eval(fixed)
        return {**self._apart, "fixed": fixed}


def device_text(device: Device) -> str:
    """What a piece needs from a GPU alone; Metal has no form of it."""
    return text("pieces/device.cu") if device == "cuda" else ""


def bounded(device: Device, warps: int, blocks: int = 0) -> str:
    """The launch bounds of ``source.bounded``, which Metal does without."""
    return source.bounded(warps, blocks) if device == "cuda" else ""
