"""The layout operations that family files declare: renaming, cutting, turning.

Each looks for its complete source and does nothing where that is absent; a partial source is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_experts.engine.weights.tensor_tree import (
    PLANES,
    Operation,
    StaysInPlace,
    Tensors,
    Tree,
    fill,
    name_of,
    numbers_in,
    per_layer,
    planes,
    put,
    take,
)
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.spec import checkpoint as spec


def rows_axis(plane: str, value: mx.array) -> int:
    """The axis of output rows: the last of a bias vector, the one before the last of a matrix."""
    return -1 if plane == "bias" or value.ndim == 1 else -2


@dataclass(frozen=True)
class RenameOperation:
    """Gives modules, tensors or whole subtrees another name."""

    spec: spec.Rename

    def rename(self, name: str, tree: Tree) -> str:
        """The name of a tensor after the operation."""
        # A tensor that stands where the tree has a parameter needs no other name.
        settled = frozenset() if self.spec.source.endswith("*") else tree.shapes.keys()
        return _renamed(name, self.spec.source, self.spec.target, settled) or name

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        return _move(tensors, {name: self.rename(name, tree) for name in tensors})

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        source, target = self.spec.target, self.spec.source
        _move(tensors, {name: _renamed(name, source, target) or name for name in tensors})

    def modules(self, path: str, tree: Tree) -> list[str]:
        return [self.rename(f"{path}.weight", tree).removesuffix(".weight")]


@functools.cache
def _pattern(source: str) -> re.Pattern[str]:
    pattern = re.escape(source).replace(re.escape("{layer}"), r"(?P<layer>\d+)")
    if source.endswith("*"):
        return re.compile(pattern[: -len(re.escape("*"))] + r"(?P<rest>.+)")
    return re.compile(pattern + rf"(?P<rest>(?:\.(?:{'|'.join(PLANES)}))?)")


def _renamed(name: str, source: str, target: str, settled: Collection[str] = ()) -> str | None:
    match = _pattern(source).fullmatch(name)
    if match is None or name in settled:
        return None
    module = name.removesuffix(match["rest"]) if match["rest"] else name
    if f"{module}.weight" in settled:
        return None
    layer = match.groupdict().get("layer") or ""
    return target.removesuffix("*").replace("{layer}", layer) + match["rest"]


def _move(tensors: Tensors, names: Mapping[str, str]) -> bool:
    moved = [(new, tensors.pop(old)) for old, new in names.items() if new != old]
    for new, value in moved:
        put(tensors, new, {"": value})
    return bool(moved)


@dataclass(frozen=True)
class SplitOperation:
    """Cuts one module on disk into several, along its output rows."""

    source: str
    targets: tuple[str, ...]
    interleaved: bool = False
    groups: int = 1
    channels: bool = False

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for at in per_layer(self.source, tree):
            module, targets = fill(self.source, at), [fill(t, at) for t in self.targets]
            if f"{module}.weight" in tree.shapes:
                continue
            found = take(tensors, module)
            for plane, value in found.items():
                if self.channels and value.ndim:
                    parts = mx.split(value, len(targets), axis=0)
                    for target, part in zip(targets, parts, strict=True):
                        put(tensors, target, {plane: mx.contiguous(part)})
                    continue
                sizes = [tree.rows(t) for t in targets]
                for target, part in zip(targets, self._cut(plane, value, sizes, module), strict=True):
                    put(tensors, target, {plane: part})
            done = done or bool(found)
        return done

    def _cut(self, plane: str, value: mx.array, sizes: list[int], module: str) -> list[mx.array]:
        axis, count = rows_axis(plane, value), len(sizes)
        if plane == "global_scale":
            return [value] * count
        if value.ndim == 0 or value.shape[axis] != sum(sizes):
            raise TensorError(
                "a fused tensor does not have the rows of its parts",
                where=name_of(module, plane),
                expected=f"{' + '.join(map(str, sizes))} = {sum(sizes)} rows",
                found=f"shape {list(value.shape)}",
            )
        if self.interleaved:
            index = [slice(None)] * value.ndim
            parts = []
            for i in range(count):
                index[axis] = slice(i, None, count)
                parts.append(mx.contiguous(value[tuple(index)]))
            return parts
        if self.groups == 1:
            return _slices(value, sizes, axis)
        grouped = mx.unflatten(value, axis, (self.groups, -1))
        parts = _slices(grouped, [s // self.groups for s in sizes], axis)
        return [part.flatten(axis - 1, axis) for part in parts]

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        for at in per_layer(self.source, tree):
            if not all(planes(tensors, fill(t, at)) for t in self.targets):
                continue
            targets = [take(tensors, fill(t, at)) for t in self.targets]
            for plane in targets[0]:
                parts = [t[plane] for t in targets]
                axis = 0 if self.channels else rows_axis(plane, parts[0])
                if self.interleaved:
                    value = mx.stack(parts, axis=parts[0].ndim + axis + 1)
                    value = value.flatten(value.ndim - 3 if axis == -2 else value.ndim - 2, axis)
                elif self.groups == 1:
                    value = mx.concatenate(parts, axis=axis)
                else:
                    cut = [mx.unflatten(p, axis, (self.groups, -1)) for p in parts]
                    value = mx.concatenate(cut, axis=axis).flatten(axis - 1, axis)
                put(tensors, fill(self.source, at), {plane: value})

    def modules(self, path: str, tree: Tree) -> list[str]:
        at = None if f"{path}.weight" in tree.shapes else numbers_in(self.source, path)
        return [path] if at is None else [fill(target, at) for target in self.targets]


def _slices(value: mx.array, sizes: list[int], axis: int) -> list[mx.array]:
    """Copies one by one: a view would keep the whole alive, and kernels read rows without gaps."""
    parts, at = [], 0
    for size in sizes:
        index = [slice(None)] * value.ndim
        index[axis] = slice(at, at + size)
        parts.append(mx.contiguous(value[tuple(index)]))
        at += size
    return parts


def _moved_module(path: str, source: str, target: str) -> str:
    """Where a module goes whose weight is the tensor ``source``."""
    at = numbers_in(source, f"{path}.weight")
    return path if at is None else fill(target, at).removesuffix(".weight")


@dataclass(frozen=True)
class ConvOperation:
    """A depthwise kernel, [C, 1, K] on disk and [C, K, 1] in MLX, perhaps under another name."""

    source: str
    target: str

    def has_kernel(self, tree: Tree) -> bool:
        """Whether the model has the kernel in any layer."""
        return any(fill(self.target, at) in tree.shapes for at in per_layer(self.target, tree))

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for at in per_layer(self.source, tree):
            name, target = fill(self.source, at), fill(self.target, at)
            value = tensors.get(name)
            if value is not None and value.ndim == 3 and value.shape != tree.shapes.get(name):
                put(tensors, target, {"": tensors.pop(name).swapaxes(1, 2)})
                done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        for at in per_layer(self.source, tree):
            if (target := fill(self.target, at)) in tensors:
                put(tensors, fill(self.source, at), {"": tensors.pop(target).swapaxes(1, 2)})

    def modules(self, path: str, tree: Tree) -> list[str]:
        return [_moved_module(path, self.source, self.target)]


@dataclass(frozen=True)
class ReshapeOperation(StaysInPlace):
    """Gives a tensor the shape that its parameter has."""

    source: str

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        for at in per_layer(self.source, tree):
            name = fill(self.source, at)
            shape = tree.shapes.get(name)
            if name in tensors and shape is not None and tensors[name].shape != shape:
                size = 1
                for n in shape:
                    size *= n
                if tensors[name].size != size:
                    raise TensorError(
                        "a tensor does not hold as many values as its parameter",
                        where=name,
                        expected=f"shape {list(shape)}",
                        found=f"shape {list(tensors[name].shape)}",
                    )
                tensors[name] = tensors[name].reshape(shape)
        return False

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """The parameter's own shape is accepted on disk too."""


@dataclass(frozen=True)
class PickOperation:
    """Takes one row of a tensor, or its transpose, and gives it another name."""

    spec: spec.PickOp

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for at in per_layer(self.spec.source, tree):
            value = tensors.pop(fill(self.spec.source, at), None)
            if value is None:
                continue
            value = value if self.spec.row is None else value[self.spec.row]
            put(tensors, fill(self.spec.target, at), {"": value.T if self.spec.transposed else value})
            done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        for at in per_layer(self.spec.source, tree):
            value = tensors.pop(fill(self.spec.target, at), None)
            if value is None:
                continue
            value = value.T if self.spec.transposed else value
            # The rows that were left behind are gone; the one that was taken stands for them.
            rows = value if self.spec.row is None else mx.stack([value] * (self.spec.row + 1))
            put(tensors, fill(self.spec.source, at), {"": rows})

    def modules(self, path: str, tree: Tree) -> list[str]:
        return [_moved_module(path, self.spec.source, self.spec.target)]


def make_operation(op: Any, resolve: Callable[[Any], Any], plugin: Callable[[str], Any]) -> Operation:
    """The operation that a family file declares.

    Args:
        resolve: reads config references of the declaration.
        plugin: finds a plugin's operation by name.
    """
    match op:
        case spec.Rename():
            return RenameOperation(op)
        case spec.SplitOp():
            return SplitOperation(op.source, op.target, op.interleaved, resolve(op.groups), op.channels)
        case spec.ConvOp():
            return ConvOperation(op.source, op.target or op.source)
        case spec.ReshapeOp():
            return ReshapeOperation(op.source)
        case spec.PickOp():
            return PickOperation(op)
    made: Operation = plugin(op.name)(source=op.source, options=resolve(op.options))
    return made
