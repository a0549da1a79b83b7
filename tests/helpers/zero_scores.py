"""Routing where every score underflows, which must leave the weights finite."""

from __future__ import annotations

import mlx.core as mx

from mlx_experts.engine.layers.moe import MoE
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family


def check(family: Family) -> None:
    """Raises AssertionError where scores that are all zero give weights that are not finite."""
    if family.moe.router.kind != "standard" or family.moe.router.select != "topk":
        return
    plan = resolve(family, tiny_config(family))
    if not plan.moe_layers:
        return
    layer = plan.layers[plan.moe_layers[0]]
    block = MoE(layer, "block")
    experts = layer.sizes.num_experts
    logits = mx.full((1, 1, experts), -1e4) + mx.arange(experts) * 1e-3
    bias = None if block._router.bias_path is None else mx.zeros((experts,))
    _, weights = block.router.plain(logits, bias)
    assert mx.all(mx.isfinite(weights)).item()
