"""Experts and weights are the ones that a family's declared steps give, written out here in numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from representatives import one_of_each, routers
from stateful import routes_alone

from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.router import Router
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import ConfigError, UnknownFamilyError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import RouterSpec
from mlx_experts.registry.spec.values import Ref

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
BASE = {"path": "gate", "dtype": "model", "score": "softmax", "order": "score_then_topk"}


def softmax(t: np.ndarray) -> np.ndarray:
    e = np.exp(t - t.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


SCORES = {
    "softmax": softmax,
    "sigmoid": lambda t: 1 / (1 + np.exp(-t)),
    "sqrtsoftplus": lambda t: np.sqrt(np.log1p(np.exp(t))),
}


def reference(spec: RouterSpec, logits: np.ndarray, bias: np.ndarray | None, k: int) -> np.ndarray:
    """Weights by expert [T, E], zero for those that a token does not pick."""
    score, before = SCORES[spec.score], spec.order == "score_then_topk"
    scores = score(logits.astype(np.float64)) if before else logits.astype(np.float64)
    choice = scores if bias is None else scores + bias
    groups = spec.groups
    if groups is not None and groups.enabled and groups.each and groups.count > 1:
        parts = choice.reshape(len(choice), groups.count, -1)
        kept = np.zeros(parts.shape, bool)
        np.put_along_axis(kept, np.argsort(-parts, -1)[..., : k // groups.count], True, -1)
        choice = np.where(kept.reshape(choice.shape), choice, -np.inf)
    elif groups is not None and groups.enabled and groups.count > 1 and groups.keep < groups.count:
        parts = choice.reshape(len(choice), groups.count, -1)
        ordered = np.sort(parts, -1)
        best = ordered[..., -2:].sum(-1) if groups.score == "top2" else ordered[..., -1]
        allowed = np.zeros(best.shape, bool)
        np.put_along_axis(allowed, np.argsort(-best, -1)[:, : groups.keep], True, -1)
        choice = np.where(allowed[..., None], parts, -np.inf).reshape(choice.shape)
    picked = np.argsort(-choice, -1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, picked, -1)
    weights = weights if before else score(weights)
    rule = spec.renormalize
    if rule is not None and rule.enabled and not (rule.skip_single and k == 1):
        total = (np.abs(weights) ** rule.p).sum(-1, keepdims=True) ** (1 / rule.p)
        weights = weights / (np.maximum(total, rule.clamp) + rule.eps)
    return spread(picked, weights * spec.scale, logits.shape[-1])


def spread(indices: Any, weights: Any, experts: int) -> np.ndarray:
    """Picks [.., T, K] as one row of weights by expert for each token."""
    picks, shares = (np.array(each).reshape(-1, indices.shape[-1]) for each in (indices, weights))
    result = np.zeros((len(picks), experts))
    np.put_along_axis(result, picks.astype(int), shares, -1)
    return result


def routed(
    logits: list[float], k: int, bias: list[float] | None = None, fused: bool | None = None, **spec: Any
) -> np.ndarray:
    """One token through a router of these steps: its weights by expert."""
    router = Router(RouterSpec.model_validate({**BASE, **spec}), 4, len(logits), k, 1e-6)
    router.use_fused(fused)
    holder = nn.Module()
    router.build(holder)
    holder.gate.weight = mx.array(logits)[:, None] * mx.array([[1.0, 0, 0, 0]])
    if bias is not None:
        holder.bias = mx.array(bias)
    holder.eval()
    return spread(*router.bind(holder)(mx.array([[[1.0, 0, 0, 0]]])), len(logits))[0]


@pytest.mark.report("RTE-01", "RTE-05")
@pytest.mark.parametrize("name", one_of_each(routers, [name for name in FAMILIES if routes_alone(name)]))
def test_every_family_routes_by_its_declared_steps(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    blocks = lab.blocks(model)[:2]
    assert blocks
    for moe in blocks:
        router = moe._router
        if router.select is not None:
            assert catalog().load(name).moe.router.select != "topk"  # a plugin's, which has its own test
            continue
        mx.random.seed(3)
        x = mx.random.normal((1, 24, router.dims)) * 2
        bias = None if router.bias_path is None else np.array(find(moe, router.bias_path))
        want = reference(router.spec, np.array(moe.router.logits(x)[0]), bias, router.top_k)
        if router.spec.expert_scale:
            want = want * np.array(find(moe, router.spec.expert_scale))
        assert np.abs(spread(*moe.route(x), router.experts) - want).max() < 1e-5


@pytest.mark.report("RTE-01")
def test_scores_over_all_experts_are_not_scores_over_the_picked() -> None:
    over_all, over_picked = routed([2, 1, 0, -1], 2), routed([2, 1, 0, -1], 2, order="topk_then_score")
    assert over_all[:2] == pytest.approx([0.6439, 0.2369], abs=1e-4)
    assert over_picked[:2] == pytest.approx([0.7311, 0.2689], abs=1e-4)


@pytest.mark.report("RTE-05")
def test_square_root_of_softplus_is_exact_and_does_not_overflow() -> None:
    assert routed([3, -4, 100, -100], 4, score="sqrtsoftplus") == pytest.approx(
        [np.log1p(np.exp(3)) ** 0.5, np.log1p(np.exp(-4)) ** 0.5, 10.0, 0.0], abs=1e-6
    )


LOGITS = [3.0, 1.0, 0.5, -2.0]


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        ({"multiplier": 0.7}, [0.7 * v for v in LOGITS]),
        ({"temperature": 4.0}, [v / 4.0 for v in LOGITS]),
        ({"softcap": 2.0}, [2.0 * np.tanh(v / 2.0) for v in LOGITS]),
        (
            {"multiplier": 0.7, "temperature": 4.0, "softcap": 2.0},
            [2 * np.tanh(0.7 * v / 4 / 2) for v in LOGITS],
        ),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_logits_are_multiplied_divided_and_capped_before_they_are_scored(
    step: dict[str, float], changed: list[float]
) -> None:
    want = softmax(np.array(changed))
    want[3] = 0.0
    assert routed(LOGITS, 3, **step) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("rule", "k", "weights"),
    [
        ({}, 2, [0.8 / 1.4, 0.6 / 1.4]),
        ({"eps": 0.6}, 2, [0.4, 0.3]),
        ({"clamp": 2.0}, 2, [0.4, 0.3]),
        ({"clamp": 1.0}, 2, [0.8 / 1.4, 0.6 / 1.4]),
        ({"clamp": 2.0, "eps": 2.0}, 2, [0.2, 0.15]),
        ({"p": 3.0}, 2, [0.8 / 0.728 ** (1 / 3), 0.6 / 0.728 ** (1 / 3)]),
        ({"skip_single": True}, 1, [0.8, 0.0]),
        ({"skip_single": True}, 2, [0.8 / 1.4, 0.6 / 1.4]),
        ({"enabled": False}, 2, [0.8, 0.6]),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [True, False])
def test_picked_scores_are_divided_by_the_norm_that_the_rule_names(
    rule: dict[str, Any], k: int, weights: list[float], fused: bool
) -> None:
    """Scores of 0.8, 0.6 and 0.2, in one launch where it knows the rule, and step by step."""
    logits = [float(np.log(s / (1 - s))) for s in (0.8, 0.6, 0.2)]
    got = routed(logits, k, fused=fused, score="sigmoid", renormalize={"enabled": True, **rule})
    assert got == pytest.approx([*weights, 0.0], abs=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("kind", "close"), [("float32", 1e-6), ("logits", 1e-2)])
@pytest.mark.parametrize("score", SCORES)
def test_scores_are_computed_in_the_type_that_the_family_names(
    score: str, kind: str, close: float, fused: bool
) -> None:
    """The logits of a bfloat16 model are widened before they are scored, or scored as they are."""
    spec = RouterSpec.model_validate({**BASE, "score": score, "score_dtype": kind})
    router, holder, logits = Router(spec, 4, 4, 4, 1e-6), nn.Module(), [0.3125, 1.75, -2.0, 0.875]
    router.use_fused(fused)
    router.build(holder)
    holder.gate.weight = (mx.array(logits)[:, None] * mx.array([[1.0, 0, 0, 0]])).astype(mx.bfloat16)
    holder.eval()
    got = spread(*router.bind(holder)(mx.array([[[1.0, 0, 0, 0]]], mx.bfloat16)), 4)[0]
    distance = np.abs(got - SCORES[score](np.array(logits))).max()
    assert distance < close
    assert (distance > 1e-5) == (kind == "logits")


def test_a_bias_for_the_selection_is_added_in_float32_to_scores_of_any_type() -> None:
    """Biases that are one value in bfloat16 still order the experts of a router that scores in it."""
    spec = {**BASE, "score": "sigmoid", "score_dtype": "logits", "selection_bias": {"path": "bias"}}
    router, holder = Router(RouterSpec.model_validate(spec), 4, 4, 2, 1e-6), nn.Module()
    router.build(holder)
    holder.gate.weight = mx.zeros((4, 4), mx.bfloat16)
    holder.bias = mx.array([7.0, 7.01, 7.003, 7.006])
    holder.eval()
    indices, weights = router.bind(holder)(mx.ones((1, 1, 4), mx.bfloat16))
    assert sorted(indices.flatten().tolist()) == [1, 3]
    assert weights.flatten().tolist() == [0.5, 0.5]


def test_the_input_is_normalised_and_scaled_before_the_router_reads_it() -> None:
    """gemma4: an RMS norm without a weight of its own, times a learned scale over the root of the width."""
    spec = RouterSpec.model_validate({**BASE, "input_norm": "scale"})
    router, holder = Router(spec, 4, 3, 3, 1e-6), nn.Module()
    router.build(holder)
    holder.scale = mx.array([1.0, 2.0, 3.0, 4.0])
    holder.eval()
    x = np.array([3.0, -1.0, 2.0, 0.5])
    normed = x / np.sqrt((x**2).mean() + 1e-6) * np.array(holder.scale) / 2.0
    want = softmax(normed @ np.array(holder.gate.weight).T)
    got = spread(*router.bind(holder)(mx.array(x, mx.float32)[None, None]), 3)[0]
    assert got == pytest.approx(want, abs=1e-6)


@pytest.mark.report("RTE-05", "RTE-15")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_score_that_the_family_does_not_have_is_refused(name: str) -> None:
    family = catalog().load(name)
    config, score = tiny_config(family), family.moe.router.score
    keys = score.keys if isinstance(score, Ref) else ("scoring_func",)
    level = config[family.text_keys[0]] if family.text_config else config
    words = ["hardmax"] if isinstance(score, Ref) else ["sqrtsoftplus"] * (score != "sqrtsoftplus")
    for word in words:
        level[keys[0]] = word
        with pytest.raises(ConfigError, match=f"{keys[0]}|score function"):
            build_tiny(family, config)


@pytest.mark.report("RTE-15")
@pytest.mark.parametrize(
    "feature", [{"num_hash_layers": 3}, {"hc_mult": 4}, {"o_groups": 8}, {"swiglu_limit": 10.0}]
)
def test_a_config_of_a_newer_model_is_not_read_as_its_predecessor(feature: dict[str, Any]) -> None:
    family = catalog().load("deepseek_v3")
    with pytest.raises(ConfigError, match=next(iter(feature))):
        resolve(family, {**tiny_config(family), **feature})
    neutral = dict.fromkeys(feature)
    assert resolve(family, {**tiny_config(family), **neutral}).moe_layers
    newer = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    assert catalog().resolve(newer).name == "deepseek_v4"
    with pytest.raises(UnknownFamilyError, match="deepseek_v9"):
        catalog().resolve({"model_type": "deepseek_v9", "architectures": ["DeepseekV9ForCausalLM"]})


@pytest.mark.report("RTE-16")
@pytest.mark.parametrize("name", one_of_each(routers, [name for name in FAMILIES if routes_alone(name)]))
def test_a_token_may_pick_every_expert(name: str, lab: Any) -> None:
    family = catalog().load(name)
    zero = lab.blocks(lab.tiny(name)[0])[0]._spec.experts.zero_experts
    config = lab.resized(name, num_experts=2, top_k=2 + zero)
    if family.moe.router.groups is not None:
        set_groups(family, config, 1, 1)
    model = build_tiny(family, config)
    moe = lab.blocks(model)[0]
    indices, weights = moe.route(mx.random.normal((1, 5, moe._router.dims)))
    assert all(sorted(row) == list(range(2 + zero)) for row in indices[0].tolist())
    assert mx.isfinite(weights).all().item()
    assert mx.isfinite(model(lab.ids)).all().item()


def limits_groups(name: str) -> bool:
    """Whether a family keeps some of its groups; one that picks from each has one number for both."""
    groups = catalog().load(name).moe.router.groups
    return groups is not None and not groups.each


GROUPED = [name for name in FAMILIES if limits_groups(name)]


# Some originals give excluded groups 0 on purpose: below a negative bias they win.
NEVER = [n for n in GROUPED if catalog().load(n).moe.router.groups.excluded == "never"]


@pytest.mark.parametrize("name", NEVER)
def test_experts_of_dropped_groups_never_win_whatever_the_bias(name: str, lab: Any) -> None:
    family, config = catalog().load(name), lab.resized(name, num_experts=8, top_k=2)
    set_groups(family, config, 4, 2)
    moe = lab.blocks(build_tiny(family, config))[0]
    router = moe._router
    x = mx.random.normal((1, 32, router.dims))
    if router.bias_path is None:
        bias = None
    else:
        bias = np.full(8, -2.0)
        find(moe, router.bias_path)[:] = -2.0
    want = reference(router.spec, np.array(moe.router.logits(x)[0]), bias, 2)
    assert np.abs(spread(*moe.route(x), 8) - want).max() < 1e-5


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("count", "keep"), [(4, 5), (4, 0), (3, 1), (8, 1)])
def test_groups_that_cannot_be_are_refused_before_anything_is_built(
    name: str, count: int, keep: int, lab: Any
) -> None:
    family, config = catalog().load(name), lab.resized(name, num_experts=8, top_k=2)
    set_groups(family, config, count, keep)
    with pytest.raises(ConfigError, match="group"):
        resolve(family, config)


def set_groups(family: Any, config: dict[str, Any], count: int, keep: int) -> None:
    groups = family.moe.router.groups
    level = config[family.text_keys[0]] if family.text_config else config
    for ref, value in ((groups.count, count), (groups.keep, keep), (groups.enabled, True)):
        # A switch that is the presence of a count needs no word of its own.
        if isinstance(ref, Ref) and ref.present is None:
            level[ref.keys[0]] = next((k for k, v in (ref.map or {}).items() if v is value), value)


@pytest.mark.parametrize("name", one_of_each(routers, FAMILIES))
@pytest.mark.parametrize("top_k", [0, 9])
def test_a_token_cannot_pick_none_or_more_experts_than_there_are(name: str, top_k: int, lab: Any) -> None:
    zero = lab.blocks(lab.tiny(name)[0])[0]._spec.experts.zero_experts
    config = lab.resized(name, num_experts=8, top_k=top_k + zero if top_k else 0)
    with pytest.raises(ConfigError, match="cannot pick that many experts"):
        resolve(catalog().load(name), config)
