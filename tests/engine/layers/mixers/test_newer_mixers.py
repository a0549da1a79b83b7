"""The mixers `routed`, `convolved`, `relative` and `compressed` against plain numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import RotatingKVCache

from mlx_experts.engine.layers.caches.pooled_cache import PooledCache
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mixers.compressed import Compressor
from mlx_experts.engine.layers.mixers.relative import attend_with_sinks, distances
from mlx_experts.engine.models.decoder import make_mixer
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

LENGTH = 7


def drawn(module: Any) -> dict[str, np.ndarray]:
    """The module's parameters, all random."""
    rng = np.random.default_rng(3)
    flat = {
        name: rng.normal(size=value.shape).astype(np.float32) * max(value.shape[-1], 4) ** -0.5 * 2.0
        for name, value in tree_flatten(module.parameters())
    }
    module.update(tree_unflatten([(name, mx.array(value)) for name, value in flat.items()]))
    return flat


def built(family: str) -> tuple[Any, dict[str, np.ndarray], Any]:
    """The first layer's mixer with random weights, those, and the layer's plan."""
    known = catalog().load(family)
    plan = resolve(known, tiny_config(known))
    mixer = make_mixer(plan.layers[0], plan)
    return mixer, drawn(mixer), plan.layers[0]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=shape).astype(np.float32)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    raised = np.exp(x - x.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


def turned(t: np.ndarray, theta: float, dims: int) -> np.ndarray:
    """Heads [h, L, d] of which the first ``dims`` values turn, halves together."""
    angles = np.arange(t.shape[1])[:, None] * theta ** (-np.arange(0, dims, 2) / dims)
    a, b, cos, sin = t[..., : dims // 2], t[..., dims // 2 : dims], np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, t[..., dims:]], -1)


def causal(window: int | None = None) -> np.ndarray:
    seen = np.tri(LENGTH, dtype=bool)
    if window:
        seen &= ~np.tri(LENGTH, k=-window, dtype=bool)
    return np.where(seen, 0.0, -np.inf)


def ways(mixer: Any, x: np.ndarray) -> list[np.ndarray]:
    """The output at once, without a cache, and in pieces with one."""
    ids = mx.zeros((1, LENGTH), dtype=mx.int32)
    cache, parts = mixer.make_cache(), []
    for start, stop in ((0, 4), (4, 6), (6, 7)):
        parts.append(np.array(mixer(mx.array(x[:, start:stop]), ForwardState(ids[:, start:stop]), cache)))
    return [np.array(mixer(mx.array(x), ForwardState(ids)))[0], np.concatenate(parts, axis=1)[0]]


def test_each_token_queries_by_its_experts() -> None:
    mixer, w, layer = built("jetmoe")
    spec, x = layer.mixer.options, random(1, LENGTH, layer.sizes.hidden_size)
    g, d, k = spec["kv_heads"], spec["head_dim"], spec["top_k"]
    logits = x[0] @ w["experts.router.layer.weight"].T
    picked = np.argsort(-logits, -1)[:, :k]
    shares = softmax(np.take_along_axis(logits, picked, -1))
    kv = x[0] @ w["kv_proj.weight"].T
    keys, values = (t.reshape(LENGTH, g, d).swapaxes(0, 1) for t in np.split(kv, 2, -1))
    keys, total = turned(keys, layer.rope.theta, d), np.zeros((LENGTH, layer.sizes.hidden_size))
    for slot in range(k):
        q = np.einsum("le,lre->lr", x[0], w["experts.input_linear.weight"][picked[:, slot]])
        q = turned(q.reshape(LENGTH, g, d).swapaxes(0, 1), layer.rope.theta, d)
        out = softmax(q @ keys.swapaxes(1, 2) * d**-0.5 + causal()) @ values
        out = out.swapaxes(0, 1).reshape(LENGTH, -1)
        out = np.einsum("le,lre->lr", out, w["experts.output_linear.weight"][picked[:, slot]])
        total += shares[:, slot, None] * out
    for got in ways(mixer, x):
        np.testing.assert_allclose(got, total + w["experts.bias"], rtol=2e-4, atol=2e-5)


def test_queries_and_keys_are_convolved_and_half_of_a_value_is_late() -> None:
    mixer, w, layer = built("zaya")
    spec, x = layer.mixer.options, random(1, LENGTH, layer.sizes.hidden_size)
    h, g, d = spec["heads"], spec["kv_heads"], spec["head_dim"]
    at = "qkv_proj."
    q, k = (x[0] @ w[f"{at}{n}_proj.weight"].T for n in "qk")
    mixed = np.concatenate([q, k], -1)
    # Both kernels see tokens before the first as zeros; the first one's bias is there for them, too.
    first, second = w[f"{at}conv_qk_depthwise.weight"], w[f"{at}conv_qk_grouped.weight"]
    reach = first.shape[1] + second.shape[1] - 2
    padded = np.concatenate([np.zeros((reach, mixed.shape[1])), mixed])
    steps = range(len(padded) - first.shape[1] + 1)
    once = np.stack([(padded[i : i + first.shape[1]] * first[:, :, 0].T).sum(0) for i in steps])
    once = once + w[f"{at}conv_qk_depthwise.bias"]
    twice = np.zeros_like(mixed)
    for head in range(h + g):
        rows = slice(head * d, (head + 1) * d)
        for tap in range(second.shape[1]):
            twice[:, rows] += once[tap : tap + LENGTH, rows] @ second[rows, tap].T
    twice = twice + w[f"{at}conv_qk_grouped.bias"]
    own_q = (q.reshape(LENGTH, g, h // g, d) + k.reshape(LENGTH, g, 1, d)) * 0.5
    q = twice[:, : h * d].reshape(LENGTH, h, d) + own_q.reshape(LENGTH, h, d)
    k = twice[:, h * d :].reshape(LENGTH, g, d) + own_q.mean(2)
    q, k = (t / np.linalg.norm(t, axis=-1, keepdims=True) * d**0.5 for t in (q, k))
    k = k * w["qk_norm.temp"][:, None]
    before = np.concatenate([np.zeros_like(x[0][:1]), x[0][:-1]])
    v = np.concatenate(
        [x[0] @ w[f"{at}v_proj_current.weight"].T, before @ w[f"{at}v_proj_delayed.weight"].T], -1
    )
    q, k, v = (t.swapaxes(0, 1) for t in (q, k, v.reshape(LENGTH, g, d)))
    dims = layer.rope.width(d)
    q, k = turned(q, layer.rope.theta, dims), turned(k, layer.rope.theta, dims)
    scores = q @ np.repeat(k, h // g, 0).swapaxes(1, 2) * d**-0.5
    out = softmax(scores + causal(spec.get("window"))) @ np.repeat(v, h // g, 0)
    want = out.swapaxes(0, 1).reshape(LENGTH, -1) @ w["o_proj.weight"].T
    for got in ways(mixer, x):
        np.testing.assert_allclose(got, want, rtol=5e-4, atol=5e-5)


def test_distances_follow_a_cache_that_goes_round() -> None:
    assert np.array(distances(None, 2, 4)).tolist() == [[2, 1, 0, -1], [3, 2, 1, 0]]
    cache = RotatingKVCache(4, keep=0)
    for place in range(6):
        keys, _ = cache.update_and_fetch(mx.full((1, 1, 1, 1), place), mx.zeros((1, 1, 1, 1)))
    held = np.array(keys).reshape(-1)
    assert np.array(distances(cache, 1, 4)).reshape(-1).tolist() == (5 - held).astype(int).tolist()


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    q, k, v = random(1, 4, 3, 5), random(1, 2, 6, 5), random(1, 2, 6, 5)[..., ::-1].copy()
    bias, sinks = random(1, 4, 3, 6), random(1, 4, 3, 1)
    got = np.array(attend_with_sinks(*map(mx.array, (q, k, v)), 0.4, mx.array(bias), mx.array(sinks)))
    logits = q * 0.4 @ np.repeat(k, 2, 1).swapaxes(2, 3) + bias
    weights = softmax(np.concatenate([logits, sinks], -1))[..., :-1]
    np.testing.assert_allclose(got, weights @ np.repeat(v, 2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pieces", [[11], [4, 3, 1, 3]])
def test_groups_are_pooled_by_a_softmax_of_each_channel(overlap: bool, pieces: list[int]) -> None:
    ratio, dim, width = 3, 4, 8
    made = Compressor(width, dim, ratio, overlap, 1e-3)
    w, x, cache = drawn(made), random(1, sum(pieces), width), PooledCache(ratio)
    start = 0
    for length in pieces:
        got = made(mx.array(x[:, start : start + length]), None, cache)
        start += length
    kv, gate = x[0] @ w["kv_proj.weight"].T, x[0] @ w["gate_proj.weight"].T
    want = []
    for group in range(sum(pieces) // ratio):
        rows = slice(group * ratio, (group + 1) * ratio)
        values, gates = kv[rows], gate[rows] + w["position_bias"]
        if overlap:
            values, gates = values[:, dim:], gates[:, dim:]
            if group:
                past = slice((group - 1) * ratio, group * ratio)
                values = np.concatenate([kv[past][:, :dim], values])
                gates = np.concatenate([(gate[past] + w["position_bias"])[:, :dim], gates])
        pooled = (softmax(gates, 0) * values).sum(0)
        want.append(pooled / np.sqrt((pooled * pooled).mean() + 1e-3) * w["kv_norm.weight"])
    np.testing.assert_allclose(np.array(got)[0], np.stack(want), rtol=1e-4, atol=1e-5)
