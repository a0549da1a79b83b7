"""Norm, router matrix and selection in one launch: the CUDA text on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from planted import planted

from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.pieces import routing, row_product, truth
from mlx_experts.engine.kernels.gpu.pieces.row_product import Norm, Product, RowProduct
from mlx_experts.engine.kernels.gpu.pieces.tensor_rows import TensorCut
from mlx_experts.engine.kernels.gpu.tiles.one_launch import NOTHING
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.kernels.router_kernel import RouterSteps


def run(steps, stored, on_host, make_matrix, change=lambda t: t, added=None):
    """Outputs of the piece, and the truth."""
    mx.random.seed(3)
    matrix = make_matrix(256, steps.num_experts, stored)
    norm = Norm((1 + 0.3 * mx.random.normal((256,))).astype(mx.bfloat16), 1e-6)
    assert routing.check(matrix, norm, steps) is None
    how = dict(added=added, logit="4.0f * v", join=added is None)
    piece = routing.build(matrix, norm, steps, cuda.BACKEND, mx.bfloat16, **how)
    x, branch = (mx.random.normal((1, 1, 256)).astype(mx.bfloat16) for _ in range(2))
    bias = 0.1 * mx.random.normal((steps.num_experts,))
    given = {"x": x, "branch": branch, "bias": bias, "counter": routing.zeros(x)}
    token = {name: given[name] for name in piece.tokens}
    first = on_host("cuda", piece, token, change)
    asked = RowProduct(256, (Product(matrix),), norm, added)
    normed, stream = truth.row_before(asked, token)
    logits = truth.product(asked.products[0], normed)
    return first, normed, stream, logits, None if not steps.bias else truth.wide(bias)


@pytest.mark.parametrize("stored", [("affine", 8, 64), ("plain", 16, 0)], ids=str)
def test_softmax_matches_truth(stored, on_host, make_matrix):
    steps = RouterSteps(40, 4, normalise="sum")
    got, normed, _, logits, _ = run(steps, stored, on_host, make_matrix)
    assert truth.distance(got["normed"], normed) < 3e-3
    assert truth.distance(got["y0"], logits) < 2e-6
    chosen = np.argsort(-logits, kind="stable")[:4]
    assert got["chosen"].tolist() == chosen.tolist()
    scores = np.exp(4 * (logits[chosen] - logits.max()))
    assert truth.distance(got["share"], scores / scores.sum()) < 1e-5


def test_sigmoid_with_bias_and_an_added_branch_matches_truth(on_host, make_matrix):
    steps = RouterSteps(64, 3, score="sigmoid", bias=True, groups=4, keep_groups=2, scale=2.5)
    got, normed, stream, logits, bias = run(steps, ("affine", 4, 32), on_host, make_matrix, added=1.0)
    assert truth.distance(got["normed"], normed) < 3e-3
    assert truth.distance(got["stream"], stream) < 3e-3
    scores = 1 / (1 + np.exp(-4 * logits))
    choice = (scores + bias).reshape(4, 16)
    lost = np.argsort(np.sort(choice, axis=1)[:, -2:].sum(axis=1))[:2]
    choice[lost] = -np.inf
    chosen = np.argsort(-choice.reshape(-1), kind="stable")[:3]
    assert got["chosen"][:3].tolist() == chosen.tolist()
    assert truth.distance(got["share"][:3], 2.5 * scores[chosen]) < 1e-5


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("me_fresh(y0 + (i))", "me_fresh(y0)"), ("me_set(normed + i", "me_set(normed + i / 2")],
)
def test_a_planted_mistake_is_noticed(right, wrong, on_host, make_matrix):
    steps = RouterSteps(40, 4, normalise="sum")
    change = planted(right, wrong)
    got, normed, _, logits, _ = run(steps, ("affine", 8, 64), on_host, make_matrix, change)
    right_experts = got["chosen"].tolist() == np.argsort(-logits, kind="stable")[:4].tolist()
    assert not (right_experts and truth.distance(got["normed"], normed) < 3e-3)


@pytest.mark.parametrize("how", [None, TensorCut(2, 2)], ids=["warp_a_row", "tensor_cores"])
def test_the_launch_before_leaves_zeros_to_count_with(how, on_host, make_matrix):
    asked = RowProduct(256, (Product(make_matrix(256, 64)),), residual=True)
    piece = row_product.build(asked, cuda.BACKEND, "cuda", mx.bfloat16, how=how, more=routing.ZEROS)
    token = {"x": mx.ones((1, 1, 256), mx.bfloat16), "residual": mx.ones((1, 1, 64), mx.bfloat16)}
    got = on_host("cuda", piece, token)
    assert got["cleared"].tolist() == [0] * 4
    assert truth.distance(got["y0"], truth.row_product(asked, token)["y0"]) < 3e-3


def test_the_routing_leaves_words_without_a_value(on_host, make_matrix):
    matrix, x = make_matrix(256, 40, ("affine", 8, 64)), mx.ones((1, 1, 256), mx.bfloat16)
    piece = routing.build(matrix, None, RouterSteps(40, 4), cuda.BACKEND, mx.bfloat16, state=37)
    got = on_host("cuda", piece, {"x": x, "counter": routing.zeros(x)})
    assert got["state"].tolist() == [int(NOTHING[:-1], 16)] * 37


def test_a_matrix_of_other_rows_is_declined(make_matrix):
    verdict = routing.check(make_matrix(64, 8), None, RouterSteps(16, 2))
    assert isinstance(verdict, Decline)
    assert verdict.rule == "rows"
