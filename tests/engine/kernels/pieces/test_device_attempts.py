"""What `registry check --device` tries on a GPU, played by the CPU: kernels and plain forms against truth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.cpu import router as cpu_router
from mlx_experts.engine.kernels.gpu.pieces import truth
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.tools import device_pieces


@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_every_piece_and_its_plain_form_agree_with_truth(kind, request, monkeypatch):
    host = request.getfixturevalue(f"host_{kind}")

    def played(piece, *token):
        launch, arrays = piece.prepared(*token)
        made = host.run(piece.backend, launch, arrays, piece.memory())
        return piece.views([mx.array(m).astype(d) for m, (_, d) in zip(made, piece.memory(), strict=True)])

    monkeypatch.setattr(Piece, "__call__", played)
    monkeypatch.setattr(
        device_pieces.router_kernel, "prepare", lambda steps, device: cpu_router.prepare(steps)
    )
    monkeypatch.setattr(device_pieces, "_H", 256)
    names = []
    for attempt in device_pieces.attempts(kind, mx.float32):
        if isinstance(attempt, tuple):
            assert (kind, attempt[0]) == ("metal", "norm, router matrix and selection")
            continue
        names.append(attempt.kernel)
        assert attempt.error() < 1e-5, attempt.kernel
        if attempt.kernel == "router":
            continue  # plain MLX leaves the order of the experts open
        plain = attempt.plain()
        for array, wanted in zip(plain, attempt.wanted[-len(plain) :], strict=True):
            assert truth.distance(truth.wide(array), wanted) < 1e-3, attempt.kernel
    assert names[:6] == [
        "router",
        "norm, projections and heads",
        "output and residual",
        "norm over all heads, and heads",
        "norm of a latent, and its key",
        "a matrix of each head",
    ]
    assert names[-1] == (
        "norm, router matrix and selection" if kind == "cuda" else "a gated delta net's token"
    )
    assert len(names) == (8 if kind == "cuda" else 7)


def test_a_wrong_piece_is_noticed(monkeypatch):
    monkeypatch.setattr(
        device_pieces.router_kernel, "prepare", lambda steps, device: cpu_router.prepare(steps)
    )
    monkeypatch.setattr(
        Piece,
        "__call__",
        lambda piece, *token: [mx.ones(o.shape).astype(o.dtype) for o in piece.outputs.values()],
    )
    errors = [a.error() for a in device_pieces.attempts("cuda", mx.float32) if not isinstance(a, tuple)]
    assert all(np.array(errors[1:]) > 0.1)
