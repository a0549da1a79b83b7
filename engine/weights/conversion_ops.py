"""The conversions that family files declare: renaming, cutting, turning.

Each looks for its complete source and does nothing where that is absent; a partial source is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

from mlx_experts.engine.weights.tensor_tree import (
    SUFFIXES,
    Operation,
    StaysInPlace,
    Tensors,
    Tree,
    gapless,
    module_tensors,
    name_of,
    put,
    take,
)
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.spec import checkpoint as spec
from mlx_experts.registry.spec.path_pattern import PathPattern


def rows_axis(suffix: str, value: mx.array) -> int:
    """The axis of output rows: the last of a bias vector, the one before the last of a matrix."""
    return -1 if suffix == "bias" or value.ndim == 1 else -2


@dataclass(frozen=True)
class RenameOperation:
    """Gives modules, tensors or whole subtrees another name."""

    source: PathPattern
    target: PathPattern
    layer_shift: int = 0

    def rename(self, name: str, tree: Tree) -> str:
        """The name of a tensor after the conversion."""
        # A tensor that stands where the tree has a parameter needs no other name.
        settled = frozenset() if self.source.text.endswith("*") else tree.shapes.keys()
        return _renamed(name, self.source, self.target, settled, self.layer_shift)

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        return _move(tensors, {name: self.rename(name, tree) for name in tensors})

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        _move(
            tensors,
            {name: _renamed(name, self.target, self.source, (), -self.layer_shift) for name in tensors},
        )

    def modules(self, path: str, tree: Tree) -> list[str]:
        return [self.rename(f"{path}.weight", tree).removesuffix(".weight")]


def _renamed(
    name: str, source: PathPattern, target: PathPattern, settled: Collection[str] = (), shift: int = 0
) -> str:
    """``name`` as ``target`` has it: a subtree's, a tensor's own, or that of a module's tensor."""
    module, _, suffix = name.rpartition(".")
    match, tail = source.match(name), ""
    if match is None and suffix in SUFFIXES:
        match, tail = source.match(module), f".{suffix}"
    if match is None or name in settled or (tail and f"{module}.weight" in settled):
        return name
    return target.fill(_shifted(match.numbers, shift), match.rest) + tail


def _shifted(numbers: Mapping[str, int], shift: int) -> Mapping[str, int]:
    """Numbers of a path with another number of the layer."""
    return {**numbers, "layer": numbers["layer"] + shift} if shift and "layer" in numbers else numbers


def _move(tensors: Tensors, names: Mapping[str, str]) -> bool:
    moved = [(new, tensors.pop(old)) for old, new in names.items() if new != old]
    for new, value in moved:
        put(tensors, new, {"": value})
    return bool(moved)


@dataclass(frozen=True)
class SplitOperation:
    """Cuts one module on disk into several, along its output rows."""

    source: PathPattern
    targets: tuple[PathPattern, ...]
    interleaved: bool = False
    groups: int = 1
    channels: bool = False

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for at in self.source.in_layers(tree.num_layers):
            module, targets = self.source.fill(at), [t.fill(at) for t in self.targets]
            if f"{module}.weight" in tree.shapes:
                continue
            found = take(tensors, module)
            for suffix, value in found.items():
                if self.channels and value.ndim:
                    parts = mx.split(value, len(targets), axis=0)
                    for target, part in zip(targets, parts, strict=True):
                        put(tensors, target, {suffix: gapless(part)})
                    continue
                sizes = [tree.rows(t) for t in targets]
                for target, part in zip(targets, self._cut(suffix, value, sizes, module), strict=True):
                    put(tensors, target, {suffix: part})
            done = done or bool(found)
        return done

    def _cut(self, suffix: str, value: mx.array, sizes: list[int], module: str) -> list[mx.array]:
        axis, count = rows_axis(suffix, value), len(sizes)
        if suffix == "global_scale":
            return [value] * count
        if value.ndim == 0 or value.shape[axis] != sum(sizes):
            raise TensorError(
                "a fused tensor does not have the rows of its parts",
                where=name_of(module, suffix),
                expected=f"{' + '.join(map(str, sizes))} = {sum(sizes)} rows",
                found=f"shape {list(value.shape)}",
            )
        if self.interleaved:
            index = [slice(None)] * value.ndim
            parts = []
            for i in range(count):
                index[axis] = slice(i, None, count)
                parts.append(gapless(value[tuple(index)]))
            return parts
        if self.groups == 1:
            return _slices(value, sizes, axis)
        grouped = mx.unflatten(value, axis, (self.groups, -1))
        parts = _slices(grouped, [s // self.groups for s in sizes], axis)
        return [part.flatten(axis - 1, axis) for part in parts]

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        for at in self.source.in_layers(tree.num_layers):
            if not all(module_tensors(tensors, t.fill(at)) for t in self.targets):
                continue
            targets = [take(tensors, t.fill(at)) for t in self.targets]
            for suffix in targets[0]:
                parts = [t[suffix] for t in targets]
                axis = 0 if self.channels else rows_axis(suffix, parts[0])
                if self.interleaved:
                    value = mx.stack(parts, axis=parts[0].ndim + axis + 1)
                    value = value.flatten(value.ndim - 3 if axis == -2 else value.ndim - 2, axis)
                elif self.groups == 1:
                    value = mx.concatenate(parts, axis=axis)
                else:
                    cut = [mx.unflatten(p, axis, (self.groups, -1)) for p in parts]
                    value = mx.concatenate(cut, axis=axis).flatten(axis - 1, axis)
                put(tensors, self.source.fill(at), {suffix: value})

    def modules(self, path: str, tree: Tree) -> list[str]:
        match = None if f"{path}.weight" in tree.shapes else self.source.match(path)
        return [path] if match is None else [target.fill(match.numbers) for target in self.targets]


def _slices(value: mx.array, sizes: list[int], axis: int) -> list[mx.array]:
    """Copies one by one: a view would keep the whole alive, and kernels read rows without gaps."""
    parts, at = [], 0
    for size in sizes:
        index = [slice(None)] * value.ndim
        index[axis] = slice(at, at + size)
        parts.append(gapless(value[tuple(index)]))
        at += size
    return parts


def _moved_module(path: str, source: PathPattern, target: PathPattern) -> str:
    """Where a module goes whose weight is the tensor ``source``."""
    match = source.match(f"{path}.weight")
    return path if match is None else target.fill(match.numbers).removesuffix(".weight")


@dataclass(frozen=True)
class ConvOperation:
    """A depthwise kernel, [C, 1, K] on disk and [C, K, 1] in MLX, perhaps under another name."""

    source: PathPattern
    target: PathPattern

    def has_kernel(self, tree: Tree) -> bool:
        """Whether the model has the kernel in any layer."""
        return any(self.target.fill(at) in tree.shapes for at in self.target.in_layers(tree.num_layers))

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for at in self.source.in_layers(tree.num_layers):
            name, target = self.source.fill(at), self.target.fill(at)
            value = tensors.get(name)
            if value is not None and value.ndim == 3 and value.shape != tree.shapes.get(name):
                put(tensors, target, {"": tensors.pop(name).swapaxes(1, 2)})
                done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        for at in self.source.in_layers(tree.num_layers):
            if (target := self.target.fill(at)) in tensors:
                put(tensors, self.source.fill(at), {"": tensors.pop(target).swapaxes(1, 2)})

    def modules(self, path: str, tree: Tree) -> list[str]:
        return [_moved_module(path, self.source, self.target)]


@dataclass(frozen=True)
class ReshapeOperation(StaysInPlace):
    """Gives a tensor the shape that its parameter has; of packed words and their scales, its rows."""

    source: PathPattern

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        for at in self.source.in_layers(tree.num_layers):
            name = self.source.fill(at)
            shape = tree.shapes.get(name)
            if shape is None or name not in tensors:
                continue
            if f"{name.removesuffix('.weight')}.scales" in tensors:
                self._reshape_packed(tensors, name.removesuffix(".weight"), shape)
            elif tensors[name].shape != shape:
                if tensors[name].size != prod(shape):
                    raise TensorError(
                        "a tensor does not hold as many values as its parameter",
                        where=name,
                        expected=f"shape {list(shape)}",
                        found=f"shape {list(tensors[name].shape)}",
                    )
                tensors[name] = tensors[name].reshape(shape)
        return False

    def _reshape_packed(self, tensors: Tensors, module: str, shape: tuple[int, ...]) -> None:
        """The rows of a packed module as its parameter has them, whatever one row comes to in words."""
        for name in (f"{module}.{suffix}" for suffix in ("weight", "scales", "biases")):
            if name in tensors and prod(tensors[name].shape[:-1]) == prod(shape[:-1]):
                tensors[name] = tensors[name].reshape(*shape[:-1], tensors[name].shape[-1])

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        """The parameter's own shape is accepted on disk too."""


@dataclass(frozen=True)
class PickOperation:
    """Takes one row of a tensor, or its transpose, and gives it another name."""

    source: PathPattern
    target: PathPattern
    row: int | None = None
    transposed: bool = False

    def forward(self, tensors: Tensors, tree: Tree) -> bool:
        done = False
        for at in self.source.in_layers(tree.num_layers):
            value = tensors.pop(self.source.fill(at), None)
            if value is None:
                continue
            value = value if self.row is None else value[self.row]
            put(tensors, self.target.fill(at), {"": value.T if self.transposed else value})
            done = True
        return done

    def backward(self, tensors: Tensors, tree: Tree) -> None:
        for at in self.source.in_layers(tree.num_layers):
            value = tensors.pop(self.target.fill(at), None)
            if value is None:
                continue
            value = value.T if self.transposed else value
            # The rows that were left behind are gone; the one that was taken stands for them.
            rows = value if self.row is None else mx.stack([value] * (self.row + 1))
            put(tensors, self.source.fill(at), {"": rows})

    def modules(self, path: str, tree: Tree) -> list[str]:
        return [_moved_module(path, self.source, self.target)]


def make_operation(op: Any, resolve: Callable[[Any], Any], plugin: Callable[[str], Any]) -> Operation:
    """The conversion that a family file declares.

    Args:
        resolve: reads config references of the declaration.
        plugin: finds a plugin's conversion by name.
    """
    match op:
        case spec.Rename():
            return RenameOperation(PathPattern(op.source), PathPattern(op.target), op.layer_shift)
        case spec.SplitOp():
            targets = tuple(map(PathPattern, op.target))
            source, groups = PathPattern(op.source), resolve(op.groups)
            return SplitOperation(source, targets, op.interleaved, groups, op.channels)
        case spec.ConvOp():
            return ConvOperation(PathPattern(op.source), PathPattern(op.target or op.source))
        case spec.ReshapeOp():
            return ReshapeOperation(PathPattern(op.source))
        case spec.PickOp():
            return PickOperation(PathPattern(op.source), PathPattern(op.target), op.row, op.transposed)
    made: Operation = plugin(op.name)(source=op.source, options=resolve(op.options))
    return made
