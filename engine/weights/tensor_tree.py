"""A checkpoint's tensors by name, the module tree they go to, and the interface of conversions between them.

Conversions are small, reversible and declared in family files. Each looks for its complete source and
does nothing where that is absent; a partial source is an error, so nothing is ever half consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_experts.registry.errors import TensorError

Tensors = dict[str, mx.array]
SUFFIXES = ("weight", "scales", "biases", "bias", "global_scale")
"""What the tensors of one module are called, quantised or not."""

_VIEWS = ContextVar("views", default=False)


@contextmanager
def views_only() -> Iterator[None]:
    """Inside, :func:`gapless` leaves views as they are, for who wants to know what they look at."""
    token = _VIEWS.set(True)
    try:
        yield
    finally:
        _VIEWS.reset(token)


def gapless(value: mx.array) -> mx.array:
    """A copy of a view, so that kernels read rows without gaps and what it was cut from is not kept."""
    return value if _VIEWS.get() else mx.contiguous(value)


@dataclass(frozen=True)
class Tree:
    """The parameters that a plan describes, to which a checkpoint's tensors are brought.

    Args:
        shapes: shape of every parameter before quantisation, by path.
        num_layers: decoder layers.
        experts: routed experts of each MoE layer, by layer index.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_layers: int
    experts: Mapping[int, int]

    def rows(self, module: str) -> int:
        """Output rows of a module's matrix, or the length of a vector."""
        for name in (f"{module}.weight", module):
            if name in self.shapes:
                shape = self.shapes[name]
                return shape[-2] if len(shape) > 1 else shape[0]
        raise TensorError(
            "a conversion names a module that the model does not have",
            where=module,
            hint="correct the conversion in the family file",
        )


class Operation(Protocol):
    """One conversion."""

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Bring tensors from disk names to tree names in place; whether any was there to bring."""

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Undo :meth:`forward` in place."""

    def modules(self, path: str, tree: Tree) -> list[str]:
        """Module paths that the one at ``path`` becomes: itself alone where the conversion passes it by."""


def module_tensors(tensors: Mapping[str, mx.array], module: str) -> Tensors:
    """The tensors of a module that are there, by suffix; one of the module's own name has an empty suffix."""
    found = {s: tensors[f"{module}.{s}"] for s in SUFFIXES if f"{module}.{s}" in tensors}
    if module in tensors:
        found[""] = tensors[module]
    return found


def take(tensors: Tensors, module: str) -> Tensors:
    """Remove and return the tensors of a module, by suffix."""
    found = module_tensors(tensors, module)
    for suffix in found:
        del tensors[name_of(module, suffix)]
    return found


def name_of(module: str, suffix: str) -> str:
    """Name of one of a module's tensors."""
    return f"{module}.{suffix}" if suffix else module


def put(tensors: Tensors, module: str, values: Mapping[str, mx.array]) -> None:
    """Store tensors of a module, by suffix.

    Raises:
        TensorError: a tensor of that name is there already, so two sources give one parameter.
    """
    for suffix, value in values.items():
        name = name_of(module, suffix)
        if name in tensors:
            raise TensorError(
                "two tensors of the checkpoint give the same parameter",
                where=name,
                hint="the checkpoint holds the same weights in two layouts; remove one",
            )
        tensors[name] = value


class StaysInPlace:
    """A conversion that leaves module paths as they are."""

    def modules(self, path: str, tree: Tree) -> list[str]:
        """The path itself."""
        return [path]
