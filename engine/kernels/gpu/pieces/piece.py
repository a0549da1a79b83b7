"""A launch together with the arrays that stay, as a function of the arrays of one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.gpu.source import WARP, Backend, Launch, text
from mlx_experts.engine.kernels.request import Device


@dataclass(eq=False)
class Piece:
    """One launch of a layer.

    Args:
        held: every input by name; None for those that a call gives.
        outputs: values and type of each output, by name.
        options: passed to the launch, for tests.
    """

    backend: Backend
    launch: Launch
    held: Mapping[str, mx.array | None]
    outputs: Mapping[str, tuple[int, mx.Dtype]]
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

    def __call__(self, *token: mx.array) -> list[mx.array]:
        """The outputs, each a row ``[1, 1, values]``, for the arrays that ``tokens`` names."""
        arrays = self.arrays(*token)
        key = tuple(array.dtype for array in arrays)
        run = self._made.get(key)
        if run is None:
            shapes = [(1, 1, size) for size, _ in self.outputs.values()]
            dtypes = [*key, *(dtype for _, dtype in self.outputs.values())]
            run = self._made[key] = self.launch.make(self.backend, dtypes, shapes, **self.options)
        return run(arrays)


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
