"""Carries a checkpoint's tensors from their names on disk to the module tree, and back.

Operations are small, reversible and declared in family files. Each looks for its complete source and
does nothing where that is absent; a partial source is an error, so nothing is ever half consumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_experts.registry.errors import TensorError

Tensors = dict[str, mx.array]
PLANES = ("weight", "scales", "biases", "bias", "global_scale")


@dataclass(frozen=True)
class Tree:
    """The module tree that tensors are carried to.

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
            "a layout operation names a module that the model does not have",
            where=module,
            hint="correct the operation in the family file",
        )


class Operation(Protocol):
    """One layout operation."""

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Carry disk names to tree names in place; whether anything was there to carry."""

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Undo :meth:`forward` in place."""

    def modules(self, path: str, tree: Tree) -> list[str]:
        """Module paths that the one at ``path`` becomes: itself alone where the operation passes it by."""


def planes(tensors: Tensors, module: str) -> dict[str, mx.array]:
    """The planes of a module that are present, by plane; a raw tensor of that name is its weight."""
    found = {p: tensors[f"{module}.{p}"] for p in PLANES if f"{module}.{p}" in tensors}
    if module in tensors:
        found[""] = tensors[module]
    return found


def take(tensors: Tensors, module: str) -> dict[str, mx.array]:
    """Remove and return the planes of a module."""
    found = planes(tensors, module)
    for plane in found:
        del tensors[name_of(module, plane)]
    return found


def name_of(module: str, plane: str) -> str:
    """Tensor name of a plane."""
    return f"{module}.{plane}" if plane else module


def put(tensors: Tensors, module: str, values: Mapping[str, mx.array]) -> None:
    """Store planes of a module.

    Raises:
        TensorError: a tensor of that name is there already, so two sources give one parameter.
    """
    for plane, value in values.items():
        name = name_of(module, plane)
        if name in tensors:
            raise TensorError(
                "two tensors of the checkpoint give the same parameter",
                where=name,
                hint="the checkpoint holds the same weights in two layouts; remove one",
            )
        tensors[name] = value


def per_layer(path: str, tree: Tree) -> list[dict[str, str]]:
    """Substitutions for the layers that a path stands for; one empty one when it names no layer."""
    if "{layer}" not in path:
        return [{}]
    return [{"{layer}": str(i)} for i in range(tree.num_layers)]


def fill(path: str, values: Mapping[str, str]) -> str:
    """A path with numbers in place of its braces."""
    for key, value in values.items():
        path = path.replace(key, value)
    return path


def numbers_in(pattern: str, path: str) -> dict[str, str] | None:
    """The numbers that make a declared path this one, for ``fill``; None where none do."""
    text = re.escape(pattern).replace(re.escape("{layer}"), r"(?P<layer>\d+)", 1)
    match = re.fullmatch(text.replace(re.escape("{layer}"), r"(?P=layer)"), path)
    return None if match is None else {f"{{{key}}}": value for key, value in match.groupdict().items()}


class StaysInPlace:
    """An operation that leaves module paths as they are."""

    def modules(self, path: str, tree: Tree) -> list[str]:
        """The path itself."""
        return [path]
