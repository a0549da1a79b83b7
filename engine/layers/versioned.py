"""Modules whose calls are compiled once: what a call needs is bound, and bound again when a part is replaced.

Every write into such a module raises its version, and the version of whatever holds it: ``nn.Module.update``,
``update_modules``, ``nn.quantize``, adapters, ``load_weights`` and ``train`` all write through the methods
that are watched here. MLX's own leaves (``nn.Linear``, the expert containers) are called, never unpacked, so
a write into one of them needs no notice; what unpacks their arrays (a prepared kernel) compares those itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
import mlx.nn as nn

if TYPE_CHECKING:
    from mlx_experts.engine.layers.tensor_parallel import Cuts


class Version:
    """A counter of writes, which also raises the counters of whatever holds the module."""

    __slots__ = ("_above", "count")

    def __init__(self) -> None:
        self.count = 0
        self._above: tuple[Version, ...] = ()

    def raised(self) -> None:
        """Count one write here and above."""
        self.count += 1
        for above in self._above:
            above.raised()

    def below(self, above: Version) -> None:
        """From now on a write here counts there too."""
        if above is not self and not any(above is each for each in self._above):
            self._above = (*self._above, above)


class Bound:
    """What a module's calls use, and the version that it was made for; empty in a copy or a pickle."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: tuple[int, Any] = (-1, None)

    def __reduce__(self) -> tuple[type[Bound], tuple[()]]:
        return type(self), ()


class VersionedModule(nn.Module):
    """A module that says what its calls need in :meth:`bind` and reads it with :meth:`steps`.

    A hot ``__call__`` writes the body of :meth:`steps` out: it saves a Python call a token and layer.
    """

    # Unpickling writes items before attributes: those writes count nowhere.
    _version: Version = Version()

    def __init__(self) -> None:
        super().__init__()
        self._bound = Bound()
        self._version = Version()

    @property
    def version(self) -> int:
        """How often something was written here or below."""
        return self._version.count

    def written(self) -> None:
        """Count a write that went past the methods of this class."""
        self._version.raised()

    def counts_in(self, above: VersionedModule) -> None:
        """From now on writes here raise the version of ``above`` too, which uses this module."""
        self._version.below(above._version)

    def cuts(self) -> Cuts | None:
        """What tensor parallelism spreads over the ranks; None for a module that says nothing of its own."""
        return None

    def divided(self, group: mx.distributed.Group) -> None:
        """Take notice that this rank holds its part of :meth:`cuts` from now on."""

    def bind(self) -> Any:
        """What a call needs, with every path and every question of the spec resolved."""
        raise NotImplementedError

    def steps(self) -> Any:
        """What :meth:`bind` made for the parts that are there now."""
        version, steps = self._bound.held
        return steps if version == self.version else self.rebind()

    def rebind(self) -> Any:
        """Bind anew. A write by another thread meanwhile makes the next call bind once more."""
        version, steps = self.version, self.bind()
        self._bound.held = (version, steps)
        return steps

    def apply_to_modules(self, apply_fn: Callable[[str, nn.Module], Any]) -> Self:
        """As MLX's, module by module in its order, which builds a tree of each module's children first.

        Loading goes through a model some six times.
        """
        pending: list[tuple[str, nn.Module]] = [("", self)]
        while pending:
            path, module = pending.pop()
            apply_fn(path, module)
            _add_modules(module.items(), f"{path}." if path else "", pending)
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if "_version" in self.__dict__:
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, VersionedModule):
                    part.counts_in(self)
            self._version.raised()

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._version.raised()

    def pop(self, *arguments: Any) -> Any:
        """As ``dict.pop``. MLX calls it for every plain attribute that is set, so those count as well."""
        value = super().pop(*arguments)
        self._version.raised()
        return value


def _add_modules(items: Iterable[tuple[Any, Any]], prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    """Add the modules directly in a module, and those in its lists and dictionaries, with their paths."""
    for key, value in items:
        if isinstance(value, nn.Module):
            found.append((f"{prefix}{key}", value))
        elif isinstance(value, dict):
            _add_modules(value.items(), f"{prefix}{key}.", found)
        elif isinstance(value, list):
            _add_modules(enumerate(value), f"{prefix}{key}.", found)


class Holder(VersionedModule):
    """A module of no own behaviour, for the steps of a dotted path."""
