"""Where a checkpoint's experts lie in its files, found by tracing the conversion that loading does.

MLX traces the conversion of placeholders; what it did to the experts' tensors is then done to views of the
files. Where it only looked (renamed, cut, turned, stacked, cast), the experts can be read in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.memory.views import FileView
from mlx_experts.engine.weights.conversion import WeightConverter
from mlx_experts.engine.weights.reader import array_dtype, array_shape, stored_dtypes
from mlx_experts.engine.weights.tensor_tree import views_only
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.safetensors_header import TensorInfo


@dataclass(frozen=True)
class Parts:
    """Views that stand behind each other along the first axis."""

    views: tuple[FileView, ...]

    @property
    def count(self) -> int:
        """Entries of the first axis."""
        return sum(view.shape[0] for view in self.views)

    def entries(self) -> list[FileView]:
        """Every entry of the first axis."""
        return [view.at(i) for view in self.views for i in range(view.shape[0])]


class NotInPlace(Exception):
    """A step of the conversion that computes: what it gives is not in the file."""


def trace_experts(
    converter: WeightConverter,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    names: Sequence[str],
    wanted: Sequence[str],
) -> dict[str, Parts | str]:
    """For each wanted parameter its views along the experts' axis, or the step that keeps it from having any.

    Args:
        names: tensors of the checkpoint that no rule ignores.
        wanted: parameter paths.
    """
    stored = stored_dtypes(checkpoint)
    dtypes = {name: stored[name] for name in names}

    def convert(*arrays: mx.array) -> list[mx.array]:
        tensors = dict(zip(names, arrays, strict=True))
        decoded = converter.decode(tensors, config, dtypes, values=False)
        converted = converter.convert(decoded.weights, values=False)
        return [converted.tensors[path] for path in wanted]

    graph: dict[str, Any] = {"primitive": []}

    def record(part: dict[str, Any]) -> None:
        if part["type"] == "primitive":
            graph["primitive"].append(part)
        else:
            graph[part["type"]] = part.get(part["type"])

    try:
        with views_only():
            mx.export_function(record, convert, *(_weightless(checkpoint.tensors[name]) for name in names))
    except ValueError as error:
        # MLX cannot write down every primitive; those that it cannot are no views.
        _, found, primitive = str(error).partition("Unable to get state for primitive ")
        if not found:
            raise
        return dict.fromkeys(wanted, f"computed ({primitive})")
    values: dict[str, Parts | str] = {}
    for name, given in zip(names, graph["inputs"], strict=True):
        info = checkpoint.tensors[name]
        view = FileView.whole(info.file, info.begin, array_shape(info), array_dtype(info))
        values[given[0]] = Parts((view,))
    for step in graph["primitive"]:
        inputs = [values.get(each[0], "a constant") for each in step["inputs"]]
        outputs = [each[0] for each in step["outputs"]]
        fault = next((each for each in inputs if isinstance(each, str)), None)
        try:
            parts: Sequence[Parts | str] = [fault] * len(outputs) if fault else _follow(step, inputs)
        except NotInPlace as error:
            parts = [str(error)] * len(outputs)
        values.update(zip(outputs, parts, strict=True))
    traced = {path: values[given[0]] for path, given in zip(wanted, graph["outputs"], strict=True)}
    return traced


def _weightless(info: TensorInfo) -> mx.array:
    """An array of a tensor's shape and dtype that takes no memory: MLX evaluates what it traces with."""
    return mx.broadcast_to(mx.zeros((), array_dtype(info)), array_shape(info))


def _follow(step: Mapping[str, Any], inputs: list[Any]) -> list[Parts]:
    """What a primitive does to views."""
    name, arguments = step["name"], step["arguments"]
    shapes = [each[1] for each in step["outputs"]]
    if name == "Concatenate":
        if arguments[0] != 0:
            raise NotInPlace("joined along another axis than the experts'")
        return [Parts(tuple(view for each in inputs for view in each.views))]
    parts: Parts = inputs[0]
    match name:
        case "Slice":
            return [_slice(parts, *arguments)]
        case "Split":
            return _split(parts, *arguments)
        case "Transpose":
            return [_each(parts, lambda view: view.transpose(arguments[0]), keeps=arguments[0][0] == 0)]
        case "AsType":
            return [_each(parts, lambda view: view.astype(arguments[0]))]
        case "View":
            return [_each(parts, lambda view: view.view(arguments[0]))]
        case "Reshape" | "Flatten" | "Unflatten" | "ExpandDims" | "Squeeze":
            shape = shapes[0]
            if len(parts.views) > 1:
                # Each part keeps its own entries of the first axis.
                same = bool(shape) and shape[0] == parts.count
                return [_each(parts, lambda view: view.reshape((view.shape[0], *shape[1:])), keeps=same)]
            return [_each(parts, lambda view: view.reshape(shape))]
        case "Copy" | "Contiguous" | "StopGradient":
            return [parts]
    raise NotInPlace(f"computed ({name})")


def _each(parts: Parts, change: Any, keeps: bool = True) -> Parts:
    if len(parts.views) > 1 and not keeps:
        raise NotInPlace("stacked, then put into another order")
    views = tuple(map(change, parts.views))
    if None in views:
        raise NotInPlace("put into another order")
    return Parts(views)


def _slice(parts: Parts, start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> Parts:
    if min(step, default=1) < 1:
        raise NotInPlace("taken backwards")
    if len(parts.views) == 1:
        return Parts((parts.views[0].slice(start, stop, step),))
    if step[0] != 1:
        raise NotInPlace("stacked, then taken by steps")
    views, at = [], 0
    for view in parts.views:
        count = view.shape[0]
        low, high = max(start[0] - at, 0), min(stop[0] - at, count)
        if low < high:
            views.append(view.slice((low, *start[1:]), (high, *stop[1:]), step))
        at += count
    return Parts(tuple(views))


def _split(parts: Parts, at: Sequence[int], axis: int) -> list[Parts]:
    first = parts.views[0]
    shape = (parts.count, *first.shape[1:])
    bounds = [0, *at, shape[axis]]
    found = []
    for low, high in pairwise(bounds):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = low, high
        found.append(_slice(parts, start, stop, [1] * len(shape)))
    return found
