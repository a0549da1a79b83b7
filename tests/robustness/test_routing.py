"""Experts and weights are the ones that a family's declared steps give, written out here in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_experts.engine.families import catalog
from mlx_experts.engine.kernels import gather
from mlx_experts.engine.model import Model, ModelArgs
from mlx_experts.engine.modules import find
from mlx_experts.engine.moe import MoE
from mlx_experts.engine.router import Router
from mlx_experts.registry.errors import ConfigError, UnknownFamilyError
from mlx_experts.registry.resolve import resolve
from mlx_experts.registry.schema import RouterSpec
from mlx_experts.registry.synthetic import tiny_config
from mlx_experts.registry.values import Ref

FAMILIES = catalog().names()
BASE = {"path": "gate", "form": "linear", "dtype": "model", "score": "softmax", "order": "score_then_topk"}
SCORES = {
    "softmax": lambda t: np.exp(t - t.max(-1, keepdims=True)) / np.exp(t - t.max(-1, keepdims=True)).sum(-1, keepdims=True),
    "sigmoid": lambda t: 1 / (1 + np.exp(-t)),
    "sqrtsoftplus": lambda t: np.sqrt(np.log1p(np.exp(t))),
}


def blocks(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def changed(name: str, **sizes: Any) -> dict[str, Any]:
    """A family's tiny config with other sizes, by the engine's names of them."""
    family = catalog().load(name)
    config = tiny_config(family)
    level = config
    for part in family.text_keys[0].split(".") if family.text_config else ():
        level = level[part]
    for size, value in sizes.items():
        ref = getattr(family.config, size)
        if isinstance(ref, Ref):
            *parents, leaf = ref.keys[0].split(".")
            at = level
            for part in parents:
                at = at[part]
            at[leaf] = value
    return config


def reference(spec: RouterSpec, logits: np.ndarray, bias: np.ndarray | None, k: int) -> np.ndarray:
    """Weights by expert [T, E], zero for those that a token does not pick."""
    score, before = SCORES[spec.score], spec.order == "score_then_topk"
    scores = score(logits.astype(np.float64)) if before else logits.astype(np.float64)
    choice = scores if bias is None else scores + bias
    groups = spec.groups
    if groups is not None and groups.enabled and 1 < groups.count and groups.keep < groups.count:
        parts = choice.reshape(len(choice), groups.count, -1)
        ordered = np.sort(parts, -1)
        best = ordered[..., -2:].sum(-1) if groups.score == "top2" else ordered[..., -1]
        kept = np.argsort(-best, -1)[:, : groups.keep]
        allowed = np.zeros(best.shape, bool)
        np.put_along_axis(allowed, kept, True, -1)
        choice = np.where(allowed[..., None], parts, -np.inf).reshape(choice.shape)
    picked = np.argsort(-choice, -1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, picked, -1)
    weights = weights if before else score(weights)
    rule = spec.normalise
    if rule is not None and rule.enabled and not (rule.skip_single and k == 1):
        total = (np.abs(weights) ** rule.p).sum(-1, keepdims=True) ** (1 / rule.p)
        weights = weights / (np.maximum(total, rule.clamp) + rule.eps)
    result = np.zeros_like(scores)
    np.put_along_axis(result, picked, weights * spec.scale, -1)
    return result


def spread(indices: mx.array, weights: mx.array, experts: int) -> np.ndarray:
    result = np.zeros((indices.shape[-2], experts))
    np.put_along_axis(result, np.array(indices).astype(int).reshape(-1, indices.shape[-1]), np.array(weights).reshape(-1, indices.shape[-1]), -1)
    return result


@pytest.mark.report("RTE-01", "RTE-05")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_routes_by_its_declared_steps(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    for moe in blocks(model)[:2]:
        router = moe._router
        if router.select is not None:
            continue
        mx.random.seed(3)
        x = mx.random.normal((1, 24, router.dims)) * 2
        bias = None if router.bias_path is None else np.array(find(moe, router.bias_path))
        want = reference(router.spec, np.array(router.logits(moe, x)[0]), bias, router.top_k)
        if router.spec.expert_scale:
            want = want * np.array(find(moe, router.spec.expert_scale))
        assert np.abs(spread(*router(moe, x), router.experts) - want).max() < 1e-5
