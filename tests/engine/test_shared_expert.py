"""The kernel adds a shared expert wherever nothing else stands between the two sums, in every family."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.moe import MoE
from mlx_experts.engine.selfcheck import build_tiny
from mlx_experts.registry.catalog import Catalog
from mlx_experts.registry.resolve import LayerPlan, resolve
from mlx_experts.registry.synthetic import tiny_config

CATALOG = Catalog()


def added_at_once(layer: LayerPlan) -> bool:
    """Whether the family file lets the shared expert be added to the routed sum as it is."""
    moe = layer.moe
    if moe is None or moe.shared is None or not moe.shared.exists:
        return False
    experts = moe.experts
    latent = experts.latent is not None and experts.latent.exists
    plain = experts.weigh != "input" and experts.output_scale == 1.0 and not experts.zero_experts
    return moe.shared.combine in ("sum", "sigmoid_gate") and plain and not latent


def layers_of(name: str) -> list[int]:
    """The layers of the tiny model whose kernel should add the shared expert."""
    family = CATALOG.load(name)
    if family.backbone is not None or family.block.kind != "standard":
        return []
    plan = resolve(family, tiny_config(family))
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
