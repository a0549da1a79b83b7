"""Residual forms against their definitions in plain numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_experts.engine.layers.residual.blocks import Blocks, attend
from mlx_experts.engine.layers.residual.gated import GatedConnection, GatedOptions
from mlx_experts.engine.layers.residual.hyper import HyperConnection, HyperHead, HyperOptions, sinkhorn
from mlx_experts.engine.layers.residual.scaled import AffineSite, DepthSite, PlainSite

B, L, N, D, EPS = 2, 3, 4, 8, 1e-3


def drawn(module: Any) -> dict[str, np.ndarray]:
    """The module's parameters, all random."""
    rng = np.random.default_rng(5)
    flat = {
        name: rng.normal(size=value.shape).astype(np.float32)
        for name, value in tree_flatten(module.parameters())
    }
    module.update(tree_unflatten([(name, mx.array(value)) for name, value in flat.items()]))
    return flat


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=shape).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def hyper(mix: str, **options: Any) -> HyperOptions:
    return HyperOptions.model_validate({"kind": "hyper", "streams": N, "eps": 1e-2, "mix": mix, **options})


@pytest.mark.parametrize("mix", ["sinkhorn", "none"])
def test_hyper_connections_collapse_and_mix_streams(mix: str) -> None:
    site = HyperConnection(hyper(mix, iterations=3, write_eps=0.1), D, EPS)
    w, stream, branch = drawn(site), random(B, L, N, D), random(B, L, D) + 1.0
    logits = rms(stream.reshape(B, L, N * D), EPS) @ w["fn"].T
    pre = sigmoid(logits[..., :N] * w["scale"][0] + w["base"][:N]) + 1e-2
    post = 2.0 * sigmoid(logits[..., N : 2 * N] * w["scale"][1] + w["base"][N : 2 * N]) + 0.1
    kept = stream
    if mix == "sinkhorn":
        matrix = (
            softmax((logits[..., 2 * N :] * w["scale"][2] + w["base"][2 * N :]).reshape(B, L, N, N)) + 1e-2
        )
        for step in range(3):
            if step:
                matrix = matrix / (matrix.sum(-1, keepdims=True) + 1e-2)
            matrix = matrix / (matrix.sum(-2, keepdims=True) + 1e-2)
        kept = np.einsum("blij,blid->bljd", matrix, stream)
    x, held = site.read(mx.array(stream))
    np.testing.assert_allclose(np.array(x), np.einsum("bln,blnd->bld", pre, stream), rtol=1e-4, atol=1e-5)
    got = site.write(mx.array(stream), held, mx.array(branch))
    want = kept + post[..., None] * branch[..., None, :]
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-5)


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    matrix = np.array(sinkhorn(mx.exp(mx.array(random(N, N))), 60, 0.0))
    np.testing.assert_allclose(matrix.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(-2), 1.0, atol=1e-5)


def test_the_head_collapses_the_last_streams() -> None:
    head = HyperHead(hyper("none"), D, EPS)
    w, stream = drawn(head), random(B, L, N, D)
    logits = rms(stream.reshape(B, L, N * D), EPS) @ w["hc_fn"].T
    weights = sigmoid(logits * w["hc_scale"] + w["hc_base"]) + 1e-2
    want = np.einsum("bln,blnd->bld", weights, stream)
    np.testing.assert_allclose(np.array(head(mx.array(stream))), want, rtol=1e-4, atol=1e-5)


def test_gated_streams_are_read_and_written_through_gates() -> None:
    spec = GatedOptions(kind="gated", streams=N, rank=5, mixer="a", mlp="b", head="c")
    site = GatedConnection(spec, D, EPS, centred=True, writes=True)
    w, stream, branch = drawn(site), random(B, L, N, D), random(B, L, D)
    normed = rms(stream, EPS) * (1.0 + w["hc_norm.weight"].reshape(N, D))
    flat = normed.reshape(B, L, N * D)
    down = flat @ w["input_mix_weight_down.weight"].T / N
    gate = sigmoid((down * sigmoid(down)) @ w["input_mix_weight_up.weight"].T).reshape(B, L, N, D)
    x, kept = site.read(mx.array(stream))
    np.testing.assert_allclose(np.array(x), (gate * normed).mean(-2), rtol=1e-4, atol=1e-5)
    inject = 2.0 * sigmoid(flat @ w["block_inject_weight.weight"].T / N)
    want = stream + branch[..., None, :] * inject[..., None]
    got = site.write(mx.array(stream), kept, mx.array(branch))
    np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 9])
def test_a_sum_by_depth_keeps_the_variance(n: int) -> None:
    site, stream, branch = DepthSite(n), random(B, L, D), random(B, L, D)[::-1].copy()
    x, kept = site.read(mx.array(stream))
    assert np.array_equal(np.array(x), stream)
    got = np.array(site.write(mx.array(stream), kept, mx.array(branch)))
    np.testing.assert_allclose(got, branch / n**0.5 + stream * ((n - 1) / n) ** 0.5, rtol=1e-5, atol=1e-6)


def test_an_affine_sum_has_factors_and_offsets_on_both_sides() -> None:
    site, stream, branch = AffineSite(D), random(B, L, D), random(B, L, D)[::-1].copy()
    w = drawn(site)
    got = np.array(site.write(mx.array(stream), None, mx.array(branch)))
    want = (branch + w["hidden_states_bias"]) * w["hidden_states_scale"]
    want += (stream + w["residual_bias"]) * w["residual_scale"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_plain_sum_adds() -> None:
    stream, branch = mx.array(random(B, L, D)), mx.array(random(B, L, D))
    assert mx.array_equal(PlainSite().write(stream, None, branch), stream + branch)


def test_a_query_attends_to_the_normed_sums_of_blocks() -> None:
    sums, query = random(3, B, L, D), random(2, D)
    found = attend(mx.array(query), Blocks(mx.array(sums[2]), (mx.array(sums[0]), mx.array(sums[1]))))
    values = rms(np.moveaxis(sums, 0, -2), 1e-6)
    weights = softmax(np.einsum("nd,blsd->blns", query, values) * D**-0.5)
    np.testing.assert_allclose(np.array(found), weights @ values, rtol=1e-4, atol=1e-5)
