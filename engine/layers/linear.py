"""MLX's linear layers and embeddings with the CPU's kernels behind them.

The classes below are MLX's own in everything but the call: parameters, paths, quantising, saving and what
mlx-lm's tools ask of a layer stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.linear_dispatch import LinearDispatch

OnRow = Callable[[np.ndarray], "np.ndarray | None"]


class Linear(nn.Linear):
    """MLX's linear layer."""

    computes = nn.Linear
    _dispatch: LinearDispatch

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [..., M] to [..., N]."""
        y = self._dispatch(self, x)
        return super().__call__(x) if y is None else y

    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As MLX's, with this package's class."""
        return _equipped(super().to_quantized(*args, **kwargs), self._dispatch)


class QuantizedLinear(nn.QuantizedLinear):
    """MLX's quantised linear layer."""

    computes = nn.QuantizedLinear
    _dispatch: LinearDispatch

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [..., M] to [..., N]."""
        y = self._dispatch(self, x)
        return super().__call__(x) if y is None else y


class Embedding(nn.Embedding):
    """MLX's embedding, which is a linear layer too where the head is tied to it."""

    computes = nn.Embedding
    _dispatch: LinearDispatch

    def as_linear(self, x: mx.array) -> mx.array:
        """``x`` [..., D] to logits [..., vocabulary]."""
        y = self._dispatch(self, x)
        return super().as_linear(x) if y is None else y

    def to_quantized(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As MLX's, with this package's class."""
        return _equipped(super().to_quantized(*args, **kwargs), self._dispatch)


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """MLX's quantised embedding."""

    computes = nn.QuantizedEmbedding
    _dispatch: LinearDispatch

    def as_linear(self, x: mx.array) -> mx.array:
        """``x`` [..., D] to logits [..., vocabulary]."""
        y = self._dispatch(self, x)
        return super().as_linear(x) if y is None else y


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.QuantizedLinear: QuantizedLinear,
    nn.Embedding: Embedding,
    nn.QuantizedEmbedding: QuantizedEmbedding,
}


def is_linear(layer: Any) -> bool:
    """Whether a layer is a linear one of this package and nothing else, such as an adapter."""
    return type(layer) in (Linear, QuantizedLinear)


class NarrowError(Exception):
    """A layer's output for a float32 row is no float32: its call has to be made in MLX."""


def on_row(
    layer: Callable[[mx.array], mx.array], widened: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
    """A layer's call on the CPU for one float32 row [1, M] in memory, to float32 [1, N].

    The product stays out of MLX where the layer is linear and the kernel takes it; the values are the same.

    Args:
        widened: the output's type does not matter; otherwise the call raises NarrowError for another than
            float32.
    """

    def in_float32(row: np.ndarray) -> np.ndarray:
        y = layer(mx.array(row[None])).astype(mx.float32)
        mx.eval(y)
        return np.ascontiguousarray(y).reshape(1, -1)

    def as_it_is(row: np.ndarray) -> np.ndarray:
        y = layer(mx.array(row[None]))
        if y.dtype != mx.float32:
            raise NarrowError
        mx.eval(y)
        return np.ascontiguousarray(y).reshape(1, -1)

    through_mlx = in_float32 if widened else as_it_is
    if not is_linear(layer):
        return through_mlx
    module: Any = layer

    def run(row: np.ndarray) -> np.ndarray:
        y: np.ndarray | None = module._dispatch.on_row(module, row)
        return through_mlx(row) if y is None else y

    return run


def _equipped(module: nn.Module, dispatch: LinearDispatch) -> nn.Module:
    """The same module with this package's class, where it is one of MLX's four."""
    kind = _CLASSES.get(type(module))
    if kind is not None:
        module.__class__ = kind
        module._dispatch = dispatch.fresh()
    return module


def use_activations(module: nn.Module, activations: str | None) -> None:
    """What a linear layer of this package multiplies activations as; None leaves it to the environment."""
    if isinstance(module, (Linear, QuantizedLinear, Embedding, QuantizedEmbedding)):
        module._dispatch = LinearDispatch(module._dispatch.layer, module._dispatch.fused, activations)


def equip(model: nn.Module, fused: bool | None = None) -> None:
    """Give a model's linear layers the CPU's kernels, where the CPU is what runs it.

    The modules stay the same objects, so that whoever holds one calls the kernel too.

    Args:
        model: changed in place; layers of other classes, adapters among them, are left alone.
        fused: True or False to force or forbid the kernels; None for the policy.
    """
    if current_device() != "cpu":
        return
    for path, module in model.named_modules():
        _equipped(module, LinearDispatch(path, fused))
