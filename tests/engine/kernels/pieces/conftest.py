"""Matrices and rows for the pieces, and the two ways to run one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_experts.engine.kernels.expert_weights import Stack, read_stack
from mlx_experts.engine.kernels.gpu.pieces.packed import Value
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece


def matrix(
    width: int,
    rows: int,
    stored: tuple[str, int, int] = ("affine", 4, 64),
    bias: bool = False,
    dtype: mx.Dtype = mx.bfloat16,
) -> Stack:
    """A random dense layer's matrix as (mode, bits, group size) stores it."""
    layer: nn.Module = nn.Linear(width, rows, bias=bias)
    layer.set_dtype(dtype)
    if bias:
        layer.bias = mx.random.normal((rows,)).astype(dtype)
    mode, bits, group = stored
    if mode != "plain":
        layer = nn.QuantizedLinear.from_linear(layer, group, bits, mode)
    stack = read_stack(layer, nn.Linear, nn.QuantizedLinear)
    assert stack is not None
    return stack


@pytest.fixture(scope="session")
def make_matrix() -> Callable[..., Stack]:
    """Builds a matrix."""
    return matrix


@pytest.fixture
def on_host(request: pytest.FixtureRequest) -> Callable[..., dict[str, np.ndarray]]:
    """Runs a piece's text on the CPU: ``run(kind, piece, token, change)``."""

    def run(
        kind: str, piece: Piece, token: dict[str, Value], change: Callable[[str], str] = lambda t: t
    ) -> dict[str, np.ndarray]:
        host: Any = request.getfixturevalue(f"host_{kind}")
        launch, arrays = piece.prepared(*token.values())
        made = host.run(piece.backend, launch, arrays, piece.memory(), change)
        if piece.packed is None:
            return dict(zip(piece.outputs, made, strict=True))
        raw = [mx.array(m).astype(dtype) for m, (_, dtype) in zip(made, piece.memory(), strict=True)]
        views = [v if v.dtype == mx.uint32 else v.astype(mx.float32) for v in piece.views(raw)]
        return {name: np.array(v).reshape(-1) for name, v in zip(piece.outputs, views, strict=True)}

    return run
