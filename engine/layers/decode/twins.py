"""Modules as functions of their arrays: what a compiled piece needs to see every later change of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.versioned import Bound, Version, VersionedModule


class Twins:
    """Some modules, and every array in them by place.

    A compiled function takes the arrays that are there at each call, so it sees arrays that were replaced and
    arrays that were changed in place. It calls twins: the same modules over the arrays that it was given.

    Args:
        modules: the modules.
        without: parts of them whose arrays are not needed.
    """

    def __init__(self, *modules: nn.Module, without: Sequence[nn.Module] = ()) -> None:
        self._modules, self._kept_out = modules, tuple(without)
        self._without = {id(part) for part in without}
        self.holders: list[nn.Module] = []
        self.names: list[str] = []
        for module in modules:
            self._walk(module)
        # The arrays as they were when the places were found.
        self.held: list[mx.array] = [h[n] for h, n in zip(self.holders, self.names, strict=True)]

    def again(self) -> Twins:
        """The places and arrays as they are now."""
        return Twins(*self._modules, without=self._kept_out)

    def _walk(self, module: nn.Module) -> None:
        for name, value in module.items():
            if isinstance(value, mx.array):
                self.holders.append(module)
                self.names.append(name)
            elif isinstance(value, nn.Module) and id(value) not in self._without:
                self._walk(value)

    def at(self, arrays: Sequence[mx.array]) -> list[Any]:
        """The modules over other arrays, given in the order of the places."""
        given = iter(arrays)
        return [self._twin(module, given) for module in self._modules]

    def now(self) -> list[Any]:
        """The modules themselves."""
        return list(self._modules)

    def _twin(self, module: nn.Module, given: Any) -> nn.Module:
        kind: Any = type(module)
        twin: nn.Module = kind.__new__(kind)
        vars(twin).update(vars(module))
        if isinstance(module, VersionedModule):
            vars(twin).update(_bound=Bound(), _version=Version())
        for name, value in module.items():
            if isinstance(value, mx.array):
                value = next(given)
            elif isinstance(value, nn.Module) and id(value) not in self._without:
                value = self._twin(value, given)
            dict.__setitem__(twin, name, value)
        return twin
