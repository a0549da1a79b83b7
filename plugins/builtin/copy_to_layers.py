"""One tensor that every layer has a copy of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.tensor_tree import StaysInPlace, Tensors, Tree
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Spec


class CopyOptions(Spec):
    """Options of the operation."""

    to: str = Field(description="Path in every layer.")


@dataclass(frozen=True)
class CopyToLayers(StaysInPlace):
    """One tensor that every layer has a copy of.

    Args:
        source: its name on disk.
        to: its name in a layer.
    """

    source: str
    to: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Give it to every layer."""
        if self.source not in tensors:
            return False
        value = tensors.pop(self.source)
        tensors.update({self.to.fill(at): value for at in self.to.in_layers(tree.num_layers)})
        return True

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """One tensor for all layers again, where they are still alike; others keep their own."""
        names = [self.to.fill(at) for at in self.to.in_layers(tree.num_layers)]
        held = [tensors[name] for name in names if name in tensors]
        if held and all(mx.array_equal(held[0], other) for other in held[1:]):
            for name in names:
                tensors.pop(name, None)
            tensors[self.source] = held[0]


def make_copy(source: str, options: Mapping[str, Any]) -> CopyToLayers:
    """The operation on one tensor."""
    read = read_options(CopyOptions, options, "the layout operation `copy_to_layers`")
    return CopyToLayers(source, PathPattern(read.to))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `copy_to_layers`."""
    return {"copy_to_layers": make_copy}
