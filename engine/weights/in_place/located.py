"""A model's expert containers, and where the checkpoint's files hold what goes into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.memory.views import FileView
from mlx_experts.engine.weights.conversion import WeightConverter
from mlx_experts.engine.weights.in_place.budget import LayerSize
from mlx_experts.engine.weights.in_place.trace import trace_experts
from mlx_experts.engine.weights.reader import array_shape
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import CheckpointError


@dataclass(frozen=True)
class LocatedLayer:
    """One layer's experts in the files.

    Args:
        size: for the budget.
        container: module path.
        views: for each array (projection and name) its part of every expert.
    """

    size: LayerSize
    container: str
    views: Mapping[tuple[str, str], Sequence[FileView]]


def locate(
    converter: WeightConverter,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    *,
    on_cpu: bool,
) -> list[LocatedLayer]:
    """Where every layer's experts lie.

    Args:
        tensors: what loading would give the model, by path, for their dtypes; they are not evaluated.
        on_cpu: keep scales as they are stored, which the CPU's kernels read, and biases in float32.

    Raises:
        CheckpointError: what the model needs is not in the files as it is, but computed from them.
    """
    shapes = {name: array_shape(info) for name, info in checkpoint.tensors.items()}
    names, _ = converter.ignored.sift(shapes)
    stacks = {i: stack for i in range(converter.tree.num_layers) if (stack := converter.stack(i)) is not None}
    wanted = [
        path
        for stack in stacks.values()
        for leaf in stack.leaves
        for path in tensors
        if path.rpartition(".")[0] == f"{stack.container}.{leaf}"
    ]
    traced = trace_experts(converter, checkpoint, config, list(names), wanted)
    found: list[LocatedLayer] = []
    for i, stack in stacks.items():
        views: dict[tuple[str, str], Sequence[FileView]] = {}
        for path in wanted:
            module, _, name = path.rpartition(".")
            container, _, leaf = module.rpartition(".")
            if container != stack.container:
                continue
            parts = traced[path]
            each = (
                parts
                if isinstance(parts, str)
                else [_as_read(view, name, tensors[path].dtype, on_cpu) for view in parts.entries()]
            )
            if isinstance(each, str) or None in each or len(each) != stack.experts:
                raise CheckpointError(
                    "the experts cannot stay in the files: what the model needs is computed from them",
                    where=path,
                    found=each if isinstance(each, str) else "another type",
                    hint="registry pack PATH --output DIR writes one whose experts can be read in place",
                )
            views[leaf, name] = [view for view in each if view is not None]
        size = LayerSize(
            i,
            stack.experts,
            min(converter.plan.layers[i].sizes.top_k, stack.experts),
            sum(each[0].nbytes for each in views.values()),
        )
        found.append(LocatedLayer(size, stack.container, views))
    return found


def _as_read(view: FileView, name: str, dtype: mx.Dtype, on_cpu: bool) -> FileView | None:
    if on_cpu and name in ("scales", "biases"):
        return view if view.dtype == view.stored else replace(view, dtype=view.stored)
    return view.astype(mx.float32 if on_cpu and name == "bias" else dtype)
