"""The head as a piece of the token: its launch, played by the CPU, against float64."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import trace
from mlx_experts.engine.kernels.gpu.pieces import tensor_rows, truth
from mlx_experts.engine.kernels.gpu.pieces.packed import viewed
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.decode.output_head import OutputHead
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm
from mlx_experts.engine.models.decoder import Decoder
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config
from tests.engine.kernels.pieces.test_layers_on_host import played  # noqa: F401

WIDTH, ROWS = 128, 200
LIMITS = {mx.bfloat16: 3e-3, mx.float16: 1e-3}


def parts(tied, dtype, bits=0, bias=False):
    """A matrix with random values, and a tied head's bias."""
    matrix = nn.Embedding(ROWS, WIDTH) if tied else nn.Linear(WIDTH, ROWS, bias=bias)
    matrix.update({name: mx.random.normal(value.shape) for name, value in matrix.parameters().items()})
    matrix.set_dtype(dtype)
    if bits:
        matrix = matrix.to_quantized(64, bits)
    held = SimpleNamespace(bias={"bias": mx.random.normal((ROWS,)).astype(dtype)}) if tied and bias else None
    return matrix, None if held is None else held.bias


def values(matrix):
    """The matrix in float64."""
    weight = matrix.weight
    if "scales" in matrix:
        scales, biases = (matrix[name].astype(mx.float32) for name in ("scales", "biases"))
        weight = mx.dequantize(weight, scales, biases, matrix.group_size, matrix.bits)
    return truth.wide(weight)


@pytest.fixture
def small_too(played, monkeypatch):  # noqa: F811
    """A small head takes the launch as well."""
    monkeypatch.setattr(tensor_rows, "_LEAST_BYTES", 0)
    monkeypatch.setattr(tensor_rows, "_FEW", 0)
    monkeypatch.setattr(tensor_rows, "_has_tensor_cores", lambda: True)
    return played


CASES = {
    "untied": dict(tied=False, dtype=mx.bfloat16, bits=4),
    "tied, with a bias and a cap": dict(tied=True, dtype=mx.bfloat16, bits=8, bias=True, softcap=5.0),
    "plain, tied, scaled": dict(tied=True, dtype=mx.float16, multiplier=0.25, divisor=2.0),
    "plain, with a bias, capped": dict(tied=False, dtype=mx.bfloat16, bias=True, multiplier=0.5, softcap=3.0),
}


@pytest.mark.parametrize("added", [None, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_a_head_in_one_launch(name, added, small_too):
    mx.random.seed(1)
    case = dict(CASES[name])
    dtype = case["dtype"]
    matrix, bias = parts(case.pop("tied"), case.pop("dtype"), case.pop("bits", 0), case.pop("bias", False))
    norm = ZeroCentredRMSNorm(WIDTH, 1e-6) if added else nn.RMSNorm(WIDTH, 1e-6)
    norm.weight = (0.3 * mx.random.normal((WIDTH,))).astype(dtype)
    head = OutputHead(
        "lm_head", matrix, isinstance(matrix, nn.Embedding | nn.QuantizedEmbedding), bias=bias, **case
    )
    run = head.prepare(norm, added, "cuda", dtype)
    assert not isinstance(run, Decline), run
    x, branch = (mx.random.normal((1, 1, WIDTH)).astype(dtype) for _ in range(2))
    (made,) = run([], None, x, *([] if added is None else [branch]))
    row = truth.wide(x).reshape(-1) + (0 if added is None else added * truth.wide(branch).reshape(-1))
    weight = truth.wide(norm.weight) + (1 if added else 0)
    want = values(matrix) @ (row / np.sqrt((row**2).mean() + 1e-6) * weight)
    for held in (matrix.get("bias"), None if bias is None else bias["bias"]):
        want = want if held is None else want + truth.wide(held)
    want = want * head.multiplier / head.divisor
    want = head.softcap * np.tanh(want / head.softcap) if head.softcap else want
    made = viewed(made)
    assert (made.shape, made.dtype) == ((1, 1, ROWS), dtype)
    assert truth.distance(truth.wide(made), want) < LIMITS[dtype]
    # Plain MLX computes the same, which is what the launch is tried against.
    h = norm(x if added is None else x + branch * added)
    assert truth.distance(truth.wide(head(h)), want) < 3e-2


def test_what_stays_with_plain_mlx(small_too):
    matrix, _ = parts(False, mx.bfloat16, 4)
    norm = nn.RMSNorm(WIDTH)
    norm.set_dtype(mx.bfloat16)

    def rule(head, final=norm, device="cuda", dtype=mx.bfloat16):
        found = head.prepare(final, None, device, dtype)
        assert isinstance(found, Decline)
        return found.rule

    head = OutputHead("lm_head", matrix)
    assert rule(head, device="metal") == "device"
    assert rule(head, nn.LayerNorm(WIDTH)) == "norm"
    assert rule(OutputHead("lm_head", matrix, norm=norm)) == "norm"
    assert rule(head, dtype=mx.float16) == "dtype"
    assert rule(OutputHead("lm_head", nn.Bilinear(2, 2, 2))) == "matrix"
    wide, _ = parts(False, mx.float32)
    assert rule(OutputHead("lm_head", wide), dtype=mx.float32) == "size"


def test_a_models_token_ends_in_the_launch(small_too, monkeypatch, fresh_trace):
    family = catalog().load("olmoe")
    model = build_tiny(family, tiny_config(family) | {"num_hidden_layers": 1})
    model.eval()
    model.set_dtype(mx.bfloat16)
    caches = [make_prompt_cache(model), make_prompt_cache(model)]
    for cache in caches:
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    pieces = model.decoder.token_pieces("cuda", mx.bfloat16, compiled=False)
    made = []
    for token in (4, 5):
        ids = mx.array([[token]])
        want = model(ids, cache=caches[0]).astype(mx.float32)
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_pieces_for", lambda self, steps, device, dtype: pieces)
            made.append(model(ids, cache=caches[1]).astype(mx.float32))
        assert (mx.linalg.norm(made[-1] - want) / mx.linalg.norm(want)).item() < 3e-2
    assert trace.pieces()[-1].note == "head: cuda"
    assert trace.pieces()[-1].count == trace.pieces()[0].count == 1
