"""Queries of four uses that are stored in two tensors, two uses in each, and are one in the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_experts.engine.layers.options import read_options
from mlx_experts.engine.weights.tensor_tree import StaysInPlace, Tensors, Tree, put
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.spec.values import DiskPath, Spec


class InterleaveQueriesOptions(Spec):
    """Options of the operation."""

    inner: DiskPath
    target: DiskPath


@dataclass(frozen=True)
class InterleaveQueries(StaysInPlace):
    """``outer`` [n * 2, D] and ``inner`` [n * 2, D] become [n, 4, D], the inner two between the outer two.

    The source is transformers' ``core_model_loading.py`` (Inkling2LoopMergeMessageQueries).

    Args:
        source: name of the outer tensor.
        inner: name of the inner one.
        target: name in the module tree.
    """

    source: str
    inner: str
    target: str

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        """Join both where they are.

        Raises:
            TensorError: one of them is missing.
        """
        there = [name for name in (self.source, self.inner) if name in tensors]
        if not there:
            return False
        if len(there) == 1:
            missing = self.inner if there[0] == self.source else self.source
            raise TensorError("queries are stored in two tensors, and one is missing", where=missing)
        outer, inner = (mx.unflatten(tensors.pop(name), 0, (-1, 2)) for name in (self.source, self.inner))
        joined = mx.concatenate([outer[:, :1], inner, outer[:, 1:]], axis=1)
        put(tensors, self.target, {"": joined})
        return True

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """Part them again."""
        value = tensors.pop(self.target, None)
        if value is not None:
            put(tensors, self.source, {"": mx.stack([value[:, 0], value[:, 3]], axis=1).flatten(0, 1)})
            put(tensors, self.inner, {"": value[:, 1:3].flatten(0, 1)})


def make_interleave(source: str, options: Mapping[str, Any]) -> InterleaveQueries:
    """The operation on one tensor."""
    spec = read_options(InterleaveQueriesOptions, options, "the layout operation `interleave_queries`")
    return InterleaveQueries(source, spec.inner, spec.target)


@hookimpl
def register_conversions() -> dict[str, Any]:
    """The operation `interleave_queries`."""
    return {"interleave_queries": make_interleave}
