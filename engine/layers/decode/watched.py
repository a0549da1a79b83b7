"""The arrays that a compiled function has taken in: it must be made anew when a module has others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Watched:
    """Some modules, and every array in them by place.

    A compiled function keeps the arrays of its trace: as inputs they would cost MLX a microsecond each at
    every token. An array that is assigned to a module is noticed. An array that is changed where it lies
    (``weight[0] = 1``) is not, as in every function that ``mx.compile`` has traced.

    Args:
        modules: the modules.
        without: parts of them whose arrays are not needed.
    """

    def __init__(self, *modules: nn.Module, without: Sequence[nn.Module] = ()) -> None:
        self.modules: list[Any] = list(modules)
        self._kept_out = tuple(without)
        self._without = {id(part) for part in without}
        self.holders: list[nn.Module] = []
        self.names: list[str] = []
        for module in modules:
            self._walk(module)
        # The arrays as they were when the places were found.
        self.held: list[mx.array] = [h[n] for h, n in zip(self.holders, self.names, strict=True)]

    def again(self) -> Watched:
        """The places and arrays as they are now."""
        return Watched(*self.modules, without=self._kept_out)

    def stands(self) -> bool:
        """Whether every place still has its array."""
        return all(map(operator.is_, map(dict.get, self.holders, self.names), self.held))

    def _walk(self, module: nn.Module) -> None:
        for name, value in module.items():
            if isinstance(value, mx.array):
                self.holders.append(module)
                self.names.append(name)
            elif isinstance(value, nn.Module) and id(value) not in self._without:
                self._walk(value)
