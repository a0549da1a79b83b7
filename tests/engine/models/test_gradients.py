"""Every tiny model can be trained: gradients flow through routers and experts, and picks have none."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

# Families that build mlx-lm's model are trained as mlx-lm trains it.
FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]


def loss(model: nn.Module, ids: mx.array) -> mx.array:
    return model(ids).astype(mx.float32).logsumexp(axis=-1).sum()


@lru_cache(maxsize=1)
def trained(name: str) -> nn.Module:
    """The tiny model of a family, which nothing here changes."""
    model = build_tiny(catalog().load(name), tiny_config(catalog().load(name)))
    model.train()
    return model


# The rows come first, so that one model is built for both.
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_reach_the_experts_and_are_finite(name: str, rows: int) -> None:
    model = trained(name)
    _, gradients = nn.value_and_grad(model, loss)(model, mx.arange(1, rows + 1)[None])
    found = dict(tree_flatten(gradients))
    mx.eval(found)
    assert all(mx.isfinite(value).all().item() for value in found.values())
    blocks = {path: module for path, module in model.named_modules() if isinstance(module, MoE)}
    assert blocks
    for path, block in blocks.items():
        experts = {k: v for k, v in found.items() if k.startswith(f"{path}.{block.experts_path}.")}
        weights = [v for k, v in experts.items() if k.endswith(".weight")]
        assert len(weights) in (2, 3)
        assert all(mx.abs(v).max().item() > 0 for v in weights)


@pytest.mark.parametrize(
    ("name", "seed"), [("qwen3_moe", 3), ("deepseek_v3", 1), ("granitemoe", 1), ("gpt_oss", 3)]
)
def test_a_gradient_is_the_slope_of_the_loss(name: str, seed: int) -> None:
    """Along one random direction of the first router, in which the picks stay the same.

    (phimoe's weights hardly ever move: what is not picked is masked before the softmax.)
    """
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    ids = mx.array([[3, 1, 4, 1, 5]])
    path, block = next((p, m) for p, m in model.named_modules() if isinstance(m, MoE))
    leaf = f"{path}.{family.moe.router.path}.weight"
    start = dict(tree_flatten(model.parameters()))[leaf]
    mx.random.seed(seed)
    direction = mx.random.normal(start.shape)
    _, gradients = nn.value_and_grad(model, loss)(model, ids)
    slope = (dict(tree_flatten(gradients))[leaf] * direction).sum().item()
    ends = []
    for step in (1e-3, -1e-3):
        model.load_weights([(leaf, start + step * direction)], strict=False)
        ends.append(loss(model, ids).item())
    assert block.top_k > 1
    assert abs(slope) > 0.01
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=0.05)
