"""A table that is stored in numbered parts along its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.tensor_tree import StaysInPlace, Tensors, Tree, put
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.spec.path_pattern import PathPattern
from mlx_experts.registry.spec.values import Spec


class JoinOptions(Spec):
    """The operation takes no options: it joins whatever parts there are."""


@dataclass(frozen=True)
class JoinShards(StaysInPlace):
    """A table that is stored in numbered parts, `NAME.shard_0.weight` and so on, joined along its rows.

    Args:
        source: module path of the table.
    """

    source: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Join all parts that are there.

        Raises:
            TensorError: a part is missing.
        """
        done = False
        for at in self.source.in_layers(tree.num_layers):
            module = self.source.fill(at)
            start = f"{module}.shard_"
            numbers = sorted(int(name.split(".")[-2][6:]) for name in tensors if name.startswith(start))
            if not numbers:
                continue
            if numbers != list(range(len(numbers))):
                raise TensorError(
                    "a table is stored in parts, and one is missing",
                    where=module,
                    expected=f"parts 0 to {numbers[-1]}",
                    found=", ".join(map(str, numbers))[:80],
                )
            parts = [tensors.pop(f"{start}{i}.weight") for i in numbers]
            put(tensors, module, {"weight": mx.concatenate(parts)})
            done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """The joined table is accepted on disk too."""


def make_join(source: str, options: Mapping[str, Any]) -> JoinShards:
    """The operation on one module path."""
    read_options(JoinOptions, options, "the layout operation `join_shards`")
    return JoinShards(PathPattern(source))


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `join_shards`."""
    return {"join_shards": make_join}
