"""Experts that nearly cancel: what is left of a narrow block is right, on every path and in every form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.plugins.builtin.parallel_moe import ExpertLayer
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
NARROW = [mx.bfloat16, mx.float16]
# The sum is this share of what is added up.
LEFT = 0.02
Call = Callable[[mx.array], mx.array]


def first_block(name: str) -> tuple[Any, MoE, Callable[[Any, MoE], Call]]:
    """A tiny model, its first block, and how the model calls that block."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    at = next(i for i, layer in enumerate(model.layers) if any(isinstance(m, MoE) for m in layer.modules()))
    block = next(m for m in model.layers[at].modules() if isinstance(m, MoE))

    def call_of(model: Any, block: MoE) -> Call:
        if isinstance(block, ExpertLayer):
            return block.feed
        shared = model.plan.layers[at].moe.shared
        if shared is not None and shared.exists and shared.path.startswith("../"):
            lent = find(model.layers[at], shared.path.removeprefix("../"))
            return lambda x: block(x, lent)
        return block

    return model, block, call_of


def cancel(block: MoE, call: Call, x: mx.array) -> None:
    """Turn the last pick's down projection until the block's output is next to nothing for ``x``."""
    indices, _ = block.route(x)
    container = find(block, block.experts_path)
    down = container["down_proj" if "down_proj" in container else "fc2"]
    e = indices.reshape(-1)[-1].item()
    kept, whole = down.weight, call(x)
    # The output is affine in the projection; its slope along the output's own direction is found by trying.
    flat = whole.reshape(-1)
    probe = mx.zeros(kept.shape)
    probe[e] = mx.broadcast_to((flat / mx.linalg.norm(flat))[: kept.shape[1], None], kept.shape[1:])
    down.weight = kept + probe
    slope = (call(x) - whole).reshape(-1)
    down.weight = kept - probe * ((1 - LEFT) * (flat @ slope) / (slope @ slope))


def rms(t: mx.array) -> float:
    return mx.sqrt(mx.mean(mx.square(t.astype(mx.float32)))).item()


@pytest.mark.report("N1")
@pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "f16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_whose_experts_cancel_rounds_once_for_one_row_and_for_many(
    name: str, dtype: mx.Dtype
) -> None:
    model, block, call_of = first_block(name)
    mx.random.seed(5)
    x = mx.random.normal((1, 1, block.input_width)).astype(dtype).astype(mx.float32)
    cancel(block, call_of(model, block), x)
    narrow = copy.deepcopy(model)
    narrow.update(tree_map(lambda t: t.astype(dtype), model.parameters()))
    model.update(tree_map(lambda t: t.astype(mx.float32), narrow.parameters()))
    find_block = lambda m: next(each for each in m.modules() if isinstance(each, MoE))  # noqa: E731
    truth = call_of(model, find_block(model))(x)
    run = call_of(narrow, find_block(narrow))
    one = run(x.astype(dtype))
    assert one.dtype == dtype
    spread = mx.broadcast_to(x.astype(dtype), (1, 40, x.shape[-1]))
    for got in (one, run(spread[:, :3]), run(spread)):
        error = rms(got.astype(mx.float32) - truth) / rms(truth)
        assert error < 4e-3, f"{got.shape[1]} rows: {error:.1e}"
