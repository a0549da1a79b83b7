"""One tensor that every layer has a copy of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        """Take the first layer's."""
        for at in self.to.in_layers(tree.num_layers):
            value = tensors.pop(self.to.fill(at), None)
            if value is not None:
                tensors.setdefault(self.source, value)


def make_copy(source: str, options: Mapping[str, Any]) -> CopyToLayers:
    """The operation on one tensor."""
    read = read_options(CopyOptions, options, "the layout operation `copy_to_layers`")
    return CopyToLayers(source, PathPattern(read.to))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `copy_to_layers`."""
    return {"copy_to_layers": make_copy}
