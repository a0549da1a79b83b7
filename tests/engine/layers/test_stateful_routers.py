"""Routers that read the forward state, against plain numpy."""

from __future__ import annotations

from math import erf
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.decoder import make_mlp
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

INPUTS = np.array([[5, 9, 70, 9, 33]])


def built(family: str, index: int) -> tuple[Any, dict[str, np.ndarray], Any]:
    """A layer's MoE block with random weights, those, and the layer's plan."""
    known = catalog().load(family)
    plan = resolve(known, tiny_config(known))
    moe = make_mlp(plan.layers[index], plan, fused=False)
    rng, drawn = np.random.default_rng(3), {}
    for name, value in tree_flatten(moe.parameters()):
        whole = value.dtype == mx.int64
        drawn[name] = (
            np.stack(
                [rng.permutation(plan.sizes.num_experts)[: value.shape[1]] for _ in range(value.shape[0])]
            )
            if whole
            else rng.normal(size=value.shape).astype(np.float32) * 0.5
        )
    moe.update(tree_unflatten([(name, mx.array(value)) for name, value in drawn.items()]))
    return moe, drawn, plan.layers[index]


def inputs(width: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(1, INPUTS.shape[1], width)).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def sorted_by_index(indices: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    indices, weights = np.array(indices), np.array(weights)
    order = np.argsort(indices, axis=-1, kind="stable")
    return np.take_along_axis(indices, order, -1), np.take_along_axis(weights, order, -1)


def test_a_table_names_the_experts_and_scores_weigh_them() -> None:
    moe, w, layer = built("deepseek_v4", 0)
    x, spec = inputs(layer.sizes.hidden_size), layer.moe.router
    routed = moe._made_router.route(moe)(mx.array(x), ForwardState(mx.array(INPUTS)))
    table = next(v for k, v in w.items() if v.dtype == np.int64)
    matrix = next(v for k, v in w.items() if k.endswith("gate.weight"))
    picked = table[INPUTS]
    scores = np.sqrt(np.log1p(np.exp(x @ matrix.T)))
    weights = np.take_along_axis(scores, picked, -1)
    weights = weights / weights.sum(-1, keepdims=True) * spec.scale
    assert np.array_equal(np.array(routed.indices), picked)
    np.testing.assert_allclose(np.array(routed.weights), weights, rtol=1e-4)


def test_one_softmax_weighs_picked_and_shared_experts() -> None:
    moe, w, layer = built("inkling", 1)
    x, spec, k = inputs(layer.sizes.hidden_size), layer.moe.router, layer.sizes.top_k
    routed = moe._made_router.route(moe)(mx.array(x), ForwardState(mx.array(INPUTS)))
    count = layer.sizes.num_experts
    matrix = next(v for name, v in w.items() if v.ndim == 2 and v.shape[0] == count + spec.options["shared"])
    logits = x @ matrix.T
    bias = w[spec.selection_bias.path]
    picked = np.argsort(-(sigmoid(logits[..., :count]) + bias), axis=-1, kind="stable")[..., :k]
    both = np.concatenate([np.take_along_axis(logits, picked, -1), logits[..., count:]], -1)
    share = sigmoid(both) / sigmoid(both).sum(-1, keepdims=True)
    share = share * spec.scale * (w[spec.options["scale"]] if spec.options.get("scale") else 1.0)
    got, want = (
        sorted_by_index(routed.indices, routed.weights),
        sorted_by_index(picked, share[..., :k]),
    )
    assert np.array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4)
    np.testing.assert_allclose(np.array(routed.shared), share[..., k:], rtol=1e-4)


def test_a_memory_is_handed_on_and_the_last_pick_does_nothing() -> None:
    moe, w, layer = built("zaya", 1)
    x, spec, k = inputs(layer.sizes.hidden_size), layer.moe.router, layer.sizes.top_k
    at, mlp = spec.path, f"{spec.path}.router_mlp"
    memory = np.random.default_rng(6).normal(size=(1, 5, spec.options["width"])).astype(np.float32)
    state = ForwardState(mx.array(INPUTS), router_memory=mx.array(memory))
    routed = moe._made_router.route(moe)(mx.array(x), state)
    gelu = np.vectorize(lambda v: 0.5 * v * (1.0 + erf(v / 2**0.5)))
    h = (
        x @ w[f"{at}.down_proj.weight"].T
        + w[f"{at}.down_proj.bias"]
        + memory * w[f"{at}.router_states_scale"]
    )
    np.testing.assert_allclose(np.array(state.router_memory), h, rtol=1e-4, atol=1e-5)
    y = h / np.sqrt((h * h).mean(-1, keepdims=True) + layer.sizes.norm_eps) * w[f"{mlp}.norm.weight"]
    y = gelu(y @ w[f"{mlp}.fc1.weight"].T + w[f"{mlp}.fc1.bias"])
    y = gelu(y @ w[f"{mlp}.fc2.weight"].T + w[f"{mlp}.fc2.bias"]) @ w[f"{mlp}.out_proj.weight"].T
    scores = np.exp(y - y.max(-1, keepdims=True))
    scores = scores / scores.sum(-1, keepdims=True)
    picked = np.argsort(-(scores + w[spec.selection_bias.path]), axis=-1, kind="stable")[..., :k]
    weights = np.take_along_axis(scores, picked, -1)
    skipped = picked >= layer.sizes.num_experts
    got = sorted_by_index(routed.indices, routed.weights)
    want = sorted_by_index(np.where(skipped, 0, picked), np.where(skipped, 0.0, weights))
    assert np.array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-6)
