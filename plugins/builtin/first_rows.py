"""A matrix that is stored with rows past the last one that counts (a vocabulary padded to a round size)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.tensor_tree import (
    StaysInPlace,
    Tensors,
    Tree,
    gapless,
    module_tensors,
    name_of,
)
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Spec


class FirstRowsOptions(Spec):
    """The operation takes no options: the rows that count are those of the module tree."""


@dataclass(frozen=True)
class FirstRows(StaysInPlace):
    """Keeps as many rows of a module's tensors as its parameter has.

    Args:
        source: module path.
    """

    source: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Cut what is too long; what is too short is left for the check of shapes."""
        for at in self.source.in_layers(tree.num_layers):
            module = self.source.fill(at)
            rows = tree.rows(module)
            for suffix, value in module_tensors(tensors, module).items():
                if suffix != "global_scale" and value.ndim and value.shape[0] > rows:
                    tensors[name_of(module, suffix)] = gapless(value[:rows])
        return False

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """The rows that count are accepted on disk too."""


def make_first_rows(source: str, options: Mapping[str, Any]) -> FirstRows:
    """The operation on one module path."""
    read_options(FirstRowsOptions, options, "the layout operation `first_rows`")
    return FirstRows(PathPattern(source))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `first_rows`."""
    return {"first_rows": make_first_rows}
