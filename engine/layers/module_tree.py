"""Placing modules under the paths that checkpoints name, and the decoder's norms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.options import check_parts
from mlx_experts.engine.layers.versioned import Holder
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec.family import NormSpec
from mlx_experts.registry.spec.values import MODULE_PATH, PATH_WORDS


def place(parent: nn.Module, path: str, child: Any) -> Any:
    """Put ``child`` at a dotted path below ``parent``, making plain modules on the way.

    Returns:
        The child.

    Raises:
        SpecError: something else stands there already, or the path is none.
    """
    if re.fullmatch(MODULE_PATH, path) is None:
        raise SpecError(
            "a family file names a module by something else than a path",
            expected=PATH_WORDS[MODULE_PATH],
            found=repr(path)[:80],
        )
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in parent:
            parent[name] = Holder()
        parent = parent[name]
        if not isinstance(parent, nn.Module):
            raise SpecError(
                "a family file puts a module into something that holds none",
                where=path,
                expected=f"{name} as a module",
                found=type(parent).__name__,
            )
    if leaf in parent:
        raise SpecError("a family file puts two modules in one place", where=path)
    parent[leaf] = child
    return child


def find(parent: nn.Module, path: str) -> Any:
    """The module or array at a dotted path below ``parent``; ``parent`` itself for an empty path.

    Quantising and adapters replace modules in the tree, so what is found is bound to a module's version.
    """
    if path:
        for name in path.split("."):
            parent = parent[name]
    return parent


def take_rows(module: nn.Module, count: int, rows: Sequence[int]) -> None:
    """Keep some rows, in their order, of every array of a module whose first axis has ``count``."""
    wanted = mx.array(list(rows))
    for name in list(module):
        value = module[name]
        if isinstance(value, mx.array) and value.ndim and value.shape[0] == count:
            module[name] = value[wanted]


def look_up(embedding: nn.Module, ids: mx.array, dtype: mx.Dtype | None) -> mx.array:
    """Rows of an embedding, in the type that the model computes in.

    MLX unpacks a weight without biases to bfloat16 whatever that type is; the values are exact in it.
    """
    packed = "scales" in embedding and "biases" not in embedding
    odd = -ids.size % 4 if packed and embedding.weight.shape[-1] % 4 else 0
    if odd and ids.size:
        # MLX unpacks such weights four words at a time, and refuses rows that do not fill them.
        flat = ids.reshape(-1)
        filled = mx.concatenate([flat, mx.broadcast_to(flat[:1], (odd,))])
        rows: mx.array = embedding(filled)[: ids.size].reshape(*ids.shape, -1)
    else:
        rows = embedding(ids)
    return rows.astype(dtype) if dtype is not None and packed else rows


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm whose stored weight is the distance from one: ``x / rms(x) * (1 + weight)``."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.zeros((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        # One and a narrow weight have no exact sum of that type.
        return mx.fast.rms_norm(x, 1.0 + self.weight.astype(mx.float32), self.eps).astype(x.dtype)


class PartedRMSNorm(nn.Module):
    """RMSNorm of each of N equal parts of the width, with one weight over all of it.

    Args:
        dims: the width.
        parts: N.
    """

    def __init__(self, dims: int, parts: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._parts, self._eps = parts, eps

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [..., D] to [..., D]."""
        parts = mx.unflatten(x.astype(mx.float32), -1, (self._parts, -1))
        normed = mx.fast.rms_norm(parts, None, self._eps).flatten(-2)
        return (normed * self.weight.astype(mx.float32)).astype(x.dtype)


def make_norm(spec: NormSpec, dims: int, eps: float) -> nn.Module:
    """The norm that a family declares, over the last axis of width ``dims``."""
    if spec.kind == "layer":
        return nn.LayerNorm(dims, eps=eps)
    if spec.kind == "layer_no_bias":
        return nn.LayerNorm(dims, eps=eps, bias=False)
    if spec.parts > 1:
        check_parts(dims, spec.parts, "the width cannot be divided into the parts that are normalised")
        return PartedRMSNorm(dims, spec.parts, eps)
    if spec.offset == "run":
        return ZeroCentredRMSNorm(dims, eps)
    return nn.RMSNorm(dims, eps=eps)
