"""The kernel adds a shared expert wherever nothing else stands between the two sums, in every family."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from representatives import tiny_plan

from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.resolve.tiny_config import tiny_config

CATALOG = catalog()
# The options of a config that choose how the two sums are joined.
JOINED = {"cohere2_moe": {"shared_expert_combination_strategy": "average"}}


def added_at_once(layer: LayerPlan) -> bool:
    """Whether the family file lets the shared expert be added to the routed sum as it is."""
    moe = layer.moe
    if moe is None or moe.shared is None or not moe.shared.exists:
        return False
    experts = moe.experts
    latent = experts.latent is not None and experts.latent.exists
    plain = (
        not experts.apply_router_weight_on_input and experts.output_scale == 1.0 and not experts.zero_experts
    )
    return moe.shared.combine in ("sum", "sigmoid_gate") and plain and not latent


def layers_of(name: str) -> list[int]:
    """The layers of the tiny model whose kernel should add the shared expert."""
    family = CATALOG.load(name)
    if family.backbone is not None or family.block.kind != "standard":
        return []
    plan = tiny_plan(name)
    return [i for i, layer in enumerate(plan.layers) if added_at_once(layer)]


FAMILIES = {name: layers for name in CATALOG.names() if (layers := layers_of(name))}


def test_families_with_a_shared_expert_are_known():
    assert len(FAMILIES) > 15


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_adds_the_shared_expert(name, fresh_trace):
    family = CATALOG.load(name)
    model = build_tiny(family, tiny_config(family))
    ids = mx.array([[1, 2, 3, 4]])
    cache = make_prompt_cache(model)
    mx.eval(model(ids[:, :3], cache=cache))
    fresh_trace.reset()
    made = model(ids[:, 3:], cache=cache)
    rows = [row for row in fresh_trace.snapshot() if row.note == "with the shared expert"]
    assert len(rows) == len(FAMILIES[name])
    for module in model.modules():
        if isinstance(module, MoE):
            module.use_fused(False)
    cache = make_prompt_cache(model)
    mx.eval(model(ids[:, :3], cache=cache))
    apart = model(ids[:, 3:], cache=cache)
    assert mx.abs(made - apart).max().item() < 1e-4 * mx.abs(apart).max().item()


def _row(model, x):
    """The first block with a shared expert of its own: what it makes of a row, and the two sums."""
    block = next(m for m in model.modules() if isinstance(m, MoE) and m._shared is not None)
    shared = find(block, block._shared.path)(x)
    return block, block(x), block.routed(x), shared


@pytest.mark.parametrize("name", ["Klear", "qwen2_moe", "cohere2_moe", "deepseek_v3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_two_sums_are_joined_as_the_family_says(name, rows):
    """Klear: modeling_klear.py mixes by a softmax of two logits, the routed sum's first."""
    family = CATALOG.load(name)
    model = build_tiny(family, {**tiny_config(family), **JOINED.get(name, {})})
    x = mx.random.normal((1, rows, 64), key=mx.random.key(2))
    block, made, routed, shared = _row(model, x)
    match block._shared.combine:
        case "softmax_mix":
            logits = np.array(find(block, "coefficient")(x), np.float64)
            mix = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            wanted = np.array(routed) * mix[..., :1] + np.array(shared) * mix[..., 1:]
        case "sigmoid_gate":
            gate = np.array(find(block, "shared_expert_gate")(x), np.float64)
            wanted = np.array(routed) + np.array(shared) / (1 + np.exp(-gate))
        case "mean":
            wanted = (np.array(routed) + np.array(shared)) / 2
        case "sum":
            wanted = np.array(routed) + np.array(shared)
    np.testing.assert_allclose(np.array(made), wanted, atol=1e-6)
