"""Takes the shared expert out of a stack that holds it as one more expert, past the routed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.tensor_tree import StaysInPlace, Tensors, Tree, gapless, put
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Spec


class SharedRowOptions(Spec):
    """Where the shared expert's module goes."""

    to: str


@dataclass(frozen=True)
class SharedRowOperation(StaysInPlace):
    """Every stack in ``source`` with one row more than there are routed experts is cut in two.

    The cut runs along the experts, which no format packs, so it is exact on quantised tensors too. What is
    written keeps the two apart.
    """

    source: PathPattern
    target: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Move each stack's last row to the leaf of the same name in ``target``."""
        done = False
        for layer, experts in tree.experts.items():
            source, target = (path.fill({"layer": layer}) for path in (self.source, self.target))
            for name in [name for name in tensors if name.startswith(source + ".")]:
                value = tensors[name]
                if not value.ndim or value.shape[0] != experts + 1:
                    continue
                # Copies, so that the whole can be released.
                tensors[name] = gapless(value[:experts])
                put(tensors, target + name[len(source) :], {"": gapless(value[experts])})
                done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Checkpoints of either form load."""


def make_shared_row(source: str, options: Mapping[str, Any]) -> SharedRowOperation:
    """The operation on one module path."""
    target = read_options(SharedRowOptions, options, "the layout operation `shared_row`").to
    return SharedRowOperation(PathPattern(source), PathPattern(target))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `shared_row`."""
    return {"shared_row": make_shared_row}
