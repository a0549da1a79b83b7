"""What `registry check --device` tries on a GPU, played by the CPU: kernels and plain forms against truth."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.cpu import router as cpu_router
from mlx_experts.engine.kernels.gpu.pieces import truth
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.tools.device import pieces


@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_every_piece_and_its_plain_form_agree_with_truth(kind, request, monkeypatch):
    host = request.getfixturevalue(f"host_{kind}")

    def played(piece, *token):
        launch, arrays = piece.prepared(*token)
        made = host.run(piece.backend, launch, arrays, piece.memory())
        return piece.views([mx.array(m).astype(d) for m, (_, d) in zip(made, piece.memory(), strict=True)])

    monkeypatch.setattr(Piece, "__call__", played)
    monkeypatch.setattr(pieces.router_kernel, "prepare", lambda steps, device: cpu_router.prepare(steps))
    monkeypatch.setattr(pieces, "_H", 256)
    names = []
    for name in pieces.kernels(kind):
        attempt = pieces.attempt(name, kind, mx.float32)
        if isinstance(attempt, Decline):
            assert (kind, name) == ("metal", "norm, router matrix and selection")
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
    monkeypatch.setattr(pieces.router_kernel, "prepare", lambda steps, device: cpu_router.prepare(steps))
    monkeypatch.setattr(
        Piece,
        "__call__",
        lambda piece, *token: [mx.ones(o.shape).astype(o.dtype) for o in piece.outputs.values()],
    )
    tried = [pieces.attempt(name, "cuda", mx.float32) for name in pieces.kernels("cuda")]
    errors = [each.error() for each in tried]
    assert all(np.array(errors[1:]) > 0.1)
