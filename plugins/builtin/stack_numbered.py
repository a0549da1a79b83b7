"""Modules that are stored one by one under numbers, and used as one stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.tensor_tree import SUFFIXES, Tensors, Tree, name_of, put
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Spec


class StackOptions(Spec):
    """Options of the operation."""

    to: str = Field(description="Module path of the stack.")
    leaves: list[str] = Field(
        [], description="Leaves under each number, each a stack of its own; none for one."
    )


@dataclass(frozen=True)
class StackNumbered:
    """`NAME.0.weight`, `NAME.1.weight` and so on as one tensor, quantised ones too.

    Args:
        source: module path on disk, without the number.
        to: module path of the stack.
        leaves: what stands below a number; one empty leaf for nothing.
    """

    source: PathPattern
    to: PathPattern
    leaves: tuple[str, ...]

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Stack what is there.

        Raises:
            TensorError: a number is missing.
        """
        done = False
        for at in self.source.in_layers(tree.num_layers):
            for leaf in self.leaves:
                for suffix in SUFFIXES:
                    done |= self._stack(tensors, self.source.fill(at), self.to.fill(at), leaf, suffix)
        return done

    def _stack(self, tensors: Tensors, source: str, to: str, leaf: str, suffix: str) -> bool:
        tail = f".{leaf}.{suffix}" if leaf else f".{suffix}"
        found = {}
        for name in tensors:
            number = name[len(source) + 1 : -len(tail)]
            if name.startswith(f"{source}.") and name.endswith(tail) and number.isdigit():
                found[int(number)] = name
        if not found:
            return False
        if sorted(found) != list(range(len(found))):
            raise TensorError(
                "modules are stored by number, and one is missing",
                where=source,
                expected=f"0 to {max(found)}",
                found=", ".join(map(str, sorted(found)))[:80],
            )
        stack = mx.stack([tensors.pop(found[i]) for i in range(len(found))])
        put(tensors, name_of(to, leaf), {suffix: stack})
        return True

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Cut the stacks into numbered modules."""
        for at in self.source.in_layers(tree.num_layers):
            for leaf in self.leaves:
                for suffix in SUFFIXES:
                    name = name_of(name_of(self.to.fill(at), leaf), suffix)
                    if name not in tensors:
                        continue
                    for i, part in enumerate(tensors.pop(name)):
                        tensors[name_of(name_of(f"{self.source.fill(at)}.{i}", leaf), suffix)] = part

    def modules(self, path: str, tree: Tree) -> list[str]:
        """The stack that holds a numbered module."""
        for leaf in self.leaves:
            match = PathPattern(name_of(f"{self.source.text}.{{expert}}", leaf)).match(path)
            if match is not None:
                return [name_of(self.to.fill(match.numbers), leaf)]
        return [path]


def make_stack(source: str, options: Mapping[str, Any]) -> StackNumbered:
    """The operation on one module path."""
    read = read_options(StackOptions, options, "the layout operation `stack_numbered`")
    return StackNumbered(PathPattern(source), PathPattern(read.to), tuple(read.leaves) or ("",))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `stack_numbered`."""
    return {"stack_numbered": make_stack}
