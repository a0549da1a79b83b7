"""Attention with adjusted logits, and with pieces of one family, against plain numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.decoder import make_mixer
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

LENGTH = 9


def built(family: str, index: int = 0, **config: Any) -> tuple[Any, dict[str, np.ndarray], Any]:
    """A layer's mixer with random weights, those, and the layer's plan."""
    known = catalog().load(family)
    plan = resolve(known, {**tiny_config(known), **config})
    mixer = make_mixer(plan.layers[index], plan)
    assert mixer is not None
    rng = np.random.default_rng(3)
    drawn = {
        name: rng.normal(size=value.shape).astype(np.float32) * max(value.shape[-1], 4) ** -0.5 * 2.0
        for name, value in tree_flatten(mixer.parameters())
    }
    mixer.update(tree_unflatten([(name, mx.array(value)) for name, value in drawn.items()]))
    return mixer, drawn, plan.layers[index]


def inputs(width: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(1, LENGTH, width)).astype(np.float32)


def ways(mixer: Any, x: np.ndarray) -> dict[str, np.ndarray]:
    """The output at once, without a cache, and in pieces with one."""
    ids = mx.zeros((1, LENGTH), dtype=mx.int32)
    whole = np.array(mixer(mx.array(x), ForwardState(ids)))
    cache, parts = mixer.make_cache(), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
        parts.append(np.array(mixer(mx.array(x[:, start:stop]), ForwardState(ids[:, start:stop]), cache)))
    return {"whole": whole, "pieces": np.concatenate(parts, axis=1)}


def heads(t: np.ndarray, count: int) -> np.ndarray:
    return t.reshape(LENGTH, count, -1).swapaxes(0, 1)


def half_turned(t: np.ndarray, theta: float, dims: int) -> np.ndarray:
    """Heads [h, L, d] of which the first ``dims`` values turn, halves together."""
    angles = np.arange(LENGTH)[:, None] * theta ** (-np.arange(0, dims, 2) / dims)
    a, b = t[..., : dims // 2], t[..., dims // 2 : dims]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, t[..., dims:]], -1)


def softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def normed(t: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return t / np.sqrt((t * t).mean(-1, keepdims=True) + eps) * weight


def same(got: dict[str, np.ndarray], want: np.ndarray) -> None:
    for way, value in got.items():
        np.testing.assert_allclose(value[0], want, rtol=2e-4, atol=2e-5, err_msg=way)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def causal() -> np.ndarray:
    return np.where(np.tri(LENGTH, dtype=bool), 0.0, -np.inf)


def test_logits_are_bounded_and_grow_with_the_position() -> None:
    mixer, w, layer = built("grok", attn_logit_softcapping=0.7, attn_temperature_len=4)
    sizes, x = layer.sizes, inputs(layer.sizes.hidden_size)
    q, k, v = (x[0] @ w[f"{n}_proj.weight"].T for n in "qkv")
    q, k = (
        half_turned(heads(q, 4), 10000.0, sizes.head_dim),
        half_turned(heads(k, 2), 10000.0, sizes.head_dim),
    )
    k, v = np.repeat(k, 2, 0), np.repeat(heads(v, 2), 2, 0)
    logits = 0.7 * np.tanh(q @ k.swapaxes(1, 2) * layer_scale(layer) / 0.7)
    places = np.arange(LENGTH)
    factor = np.where(places > 4, np.log(np.maximum(places, 1)) / np.log(4), 1.0)
    weights = softmax(logits * factor[:, None] + causal())
    same(ways(mixer, x), (weights @ v).swapaxes(0, 1).reshape(LENGTH, -1) @ w["o_proj.weight"].T)


def layer_scale(layer: Any) -> float:
    stated = layer.mixer.options["attention"].get("scale")
    return layer.sizes.head_dim**-0.5 if stated is None else stated


@pytest.mark.parametrize("valued", [True, False])
def test_sinks_have_keys_that_are_normed_and_values_or_none(valued: bool) -> None:
    mixer, w, layer = built("pangu_pro_moe", param_sink_with_value=valued, qk_nope_dim=20, qk_rope_dim=12)
    x, eps = inputs(layer.sizes.hidden_size), layer.sizes.norm_eps
    q, k, v = (x[0] @ w[f"{n}_proj.weight"].T for n in "qkv")
    q, k = heads(q, 4), normed(heads(k, 2), w["k_layernorm.weight"], eps)
    angles = np.arange(LENGTH)[:, None] * 10000.0 ** (-np.arange(0, 12, 2) / 12)

    def turned(t: np.ndarray) -> np.ndarray:
        a, b = t[..., 0:12:2], t[..., 1:12:2]
        pairs = np.stack(
            [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1
        )
        return np.concatenate([pairs.reshape(*t.shape[:-1], 12), t[..., 12:]], -1)

    sinks = normed(w["param_sink_key"].swapaxes(0, 1), w["k_layernorm.weight"], eps)
    v = heads(v, 2)
    values = w["param_sink_value"].swapaxes(0, 1) if valued else np.zeros((2, sinks.shape[1], v.shape[-1]))
    k, v = np.concatenate([sinks, turned(k)], 1), np.concatenate([values, v], 1)
    k, v = np.repeat(k, 2, 0), np.repeat(v, 2, 0)
    logits = turned(q) @ k.swapaxes(1, 2) * 32**-0.5
    logits[..., sinks.shape[1] :] += causal()
    out = (softmax(logits) @ v).swapaxes(0, 1).reshape(LENGTH, -1)
    same(ways(mixer, x), out @ w["o_proj.weight"].T)


def test_queries_come_from_one_that_all_heads_share() -> None:
    mixer, w, layer = built("step3", share_q_dim=24)
    x, sizes = inputs(layer.sizes.hidden_size), layer.sizes
    shared = normed(x[0] @ w["q_proj.weight"].T, w["inter_norm.weight"], sizes.norm_eps)
    q, d, g = heads(shared @ w["wq.weight"].T, 4), sizes.head_dim, sizes.num_kv_heads
    k, v = (heads(x[0] @ w[f"{n}_proj.weight"].T, g) for n in "kv")
    theta = layer.rope.theta
    q, k = half_turned(q, theta, d), np.repeat(half_turned(k, theta, d), 4 // g, 0)
    weights = softmax(q @ k.swapaxes(1, 2) * d**-0.5 + causal())
    out = (weights @ np.repeat(v, 4 // g, 0)).swapaxes(0, 1).reshape(LENGTH, -1)
    same(ways(mixer, x), out @ w["o_proj.weight"].T)


def test_frequencies_are_mixed_for_each_key_head() -> None:
    known = catalog().load("interns1pro")
    config = tiny_config(known)
    config["text_config"]["rope_scaling"] = {"num_inv_freq": 12}
    plan = resolve(known, config)
    mixer, w, layer = built("interns1pro", **config)
    x, sizes, d = inputs(layer.sizes.hidden_size), layer.sizes, layer.sizes.head_dim
    theta = layer.mixer.options["theta"]
    angles = np.arange(LENGTH)[:, None] * theta ** (-2.0 * np.arange(12) / d)
    pad = np.ones((2, LENGTH, d // 2 - 12))
    cos = np.concatenate([np.cos(angles) @ w["rotary.cos_coef"], pad], -1)
    sin = np.concatenate([np.sin(angles) @ w["rotary.sin_coef"], pad], -1)

    def turned(t: np.ndarray, each: int) -> np.ndarray:
        a, b = t[..., : d // 2], t[..., d // 2 :]
        c, s = np.repeat(cos, each, 0), np.repeat(sin, each, 0)
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    q, k, v = (heads(x[0] @ w[f"{n}_proj.weight"].T, c) for n, c in (("q", 4), ("k", 2), ("v", 2)))
    q = turned(normed(q, w["q_norm.weight"], sizes.norm_eps), 2)
    k = np.repeat(turned(normed(k, w["k_norm.weight"], sizes.norm_eps), 1), 2, 0)
    weights = softmax(q @ k.swapaxes(1, 2) * d**-0.5 + causal())
    out = (weights @ np.repeat(v, 2, 0)).swapaxes(0, 1).reshape(LENGTH, -1)
    same(ways(mixer, x), out @ w["o_proj.weight"].T)
    assert plan.layers[0].type == "full_attention"


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_each_head_has_a_norm_and_values_come_from_experts(score: str) -> None:
    stated = {"mova_num_experts_per_tok": 2, "rope_head_dim": 16, "router_score_func": score}
    mixer, w, layer = built(
        "k2_horizon", 1, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **stated
    )
    x, sizes, d = inputs(layer.sizes.hidden_size), layer.sizes, layer.sizes.head_dim
    q, k = (heads(x[0] @ w[f"{n}_proj.weight"].T, c) for n, c in (("q", 4), ("k", 2)))
    q, k = (
        normed(t, w[f"{n}_norm.weight"].reshape(len(t), 1, d), sizes.norm_eps)
        for n, t in (("q", q), ("k", k))
    )
    angles = np.arange(LENGTH)[:, None] * 500.0 ** (-np.arange(0, 16, 2) / 16)

    def turned(t: np.ndarray) -> np.ndarray:
        """The first values of either half of a head."""
        result, a, b = t.copy(), t[..., :8], t[..., d // 2 : d // 2 + 8]
        result[..., :8] = a * np.cos(angles) - b * np.sin(angles)
        result[..., d // 2 : d // 2 + 8] = a * np.sin(angles) + b * np.cos(angles)
        return result

    logits = x[0] @ w["v_router.weight"].T
    scores = softmax(logits) if score == "softmax" else 1 / (1 + np.exp(-logits))
    v = np.zeros((LENGTH, w["v_experts.weight"].shape[1]))
    for i, picked in enumerate(np.argsort(-(scores + w["v_router.bias"]), -1)[:, :2]):
        for e in picked:
            v[i] += scores[i, e] / scores[i, picked].sum() * silu(w["v_experts.weight"][e] @ x[0, i])
    k, v = np.repeat(turned(k), 2, 0), np.repeat(heads(v, 2), 2, 0)
    weights = softmax(turned(q) @ k.swapaxes(1, 2) * d**-0.5 + causal())
    out = (weights @ v).swapaxes(0, 1).reshape(LENGTH, -1) * silu(x[0] @ w["gate_proj.weight"].T)
    same(ways(mixer, x), out @ w["o_proj.weight"].T)


def test_generated_tokens_see_the_prompt_and_the_last_of_their_own() -> None:
    mixer, w, layer = built("unlimited_ocr", 1)
    x, d, g = inputs(layer.sizes.hidden_size), layer.sizes.head_dim, layer.sizes.num_kv_heads
    window = mixer._generated
    q, k, v = (heads(x[0] @ w[f"{n}_proj.weight"].T, c) for n, c in (("q", 4), ("k", g), ("v", g)))
    theta = layer.rope.theta
    q, k = half_turned(q, theta, d), np.repeat(half_turned(k, theta, d), 4 // g, 0)
    places = np.arange(LENGTH)
    kept = (places[None] < 5) | (places[:, None] - places[None] < window)
    weights = softmax(q @ k.swapaxes(1, 2) * d**-0.5 + causal() + np.where(kept, 0.0, -np.inf))
    out = (weights @ np.repeat(v, 4 // g, 0)).swapaxes(0, 1).reshape(LENGTH, -1)
    same({"pieces": ways(mixer, x)["pieces"]}, out @ w["o_proj.weight"].T)


@pytest.mark.parametrize("theta", [0, -1.0, 1e-300])
def test_mixed_frequencies_of_no_positive_base_are_refused(theta: float) -> None:
    config = tiny_config(catalog().load("interns1pro"))
    config["text_config"]["rope_theta"] = theta
    with pytest.raises(ConfigError, match=r"'rope_theta' (must be a positive|holds a) number"):
        built("interns1pro", **config)
