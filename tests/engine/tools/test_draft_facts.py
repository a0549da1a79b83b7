"""Experts, routers and MLPs are told by their shapes, whatever they are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_experts.engine.tools.drafts.facts import read_facts

CONFIG = {"hidden_size": 32, "num_experts": 8, "num_hidden_layers": 1, "num_attention_heads": 4}


def facts(layer: dict[str, tuple[int, ...]], **config: Any) -> Any:
    tensors = {f"dec.blocks.0.{name}": SimpleNamespace(shape=shape) for name, shape in layer.items()}
    return read_facts({**CONFIG, **config}, tensors)


@pytest.mark.parametrize(
    ("stacks", "layout"),
    [
        ({"wide": (8, 24, 32), "narrow": (8, 32, 12)}, {"fused": "wide", "down": "narrow"}),
        (
            {"a": (8, 32, 24), "b": (8, 12, 32)},
            {"fused": "a", "down": "b", "transposed": True},
        ),
        (
            {"w1": (8, 12, 32), "w3": (8, 12, 32), "w2": (8, 32, 12)},
            {"projections": ["w1", "w3", "w2"]},
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_are_told_in_any_spelling(stacks: Any, layout: dict[str, Any], suffix: str) -> None:
    layer = {f"ff.pool.{name}{suffix}": shape for name, shape in stacks.items()}
    found = facts({**layer, "ff.router.weight": (8, 32)})
    assert found.sparse == (0,)
    assert found.moe_path == "ff"
    assert found.experts.width == 12
    assert found.experts.gated
    assert found.experts.layout.items() >= layout.items()
    if "fused" in layout:
        assert found.experts.layout.get("suffix", "") == suffix


def test_experts_without_a_gate_are_two_matrices_of_one_size() -> None:
    found = facts({"ff.pool.up": (8, 12, 32), "ff.pool.down": (8, 32, 12), "ff.router.weight": (8, 32)})
    assert not found.experts.gated
    assert found.experts.layout == {"kind": "stacked", "path": "ff.pool", "fused": "up", "down": "down"}


def test_a_router_its_biases_and_the_shared_expert_are_told_apart() -> None:
    layer: dict[str, tuple[int, ...]] = {
        f"mix.experts.{e}.{name}.weight": shape
        for e in range(8)
        for name, shape in (("gate_proj", (12, 32)), ("up_proj", (12, 32)), ("down_proj", (32, 12)))
    }
    layer |= {
        "mix.wg.weight": (8, 32),
        "mix.wg.bias": (8,),
        "mix.correction": (8,),
        "mix.common.gate_proj.weight": (20, 32),
        "mix.common.up_proj.weight": (20, 32),
        "mix.common.down_proj.weight": (32, 20),
        "mix.common_gate.weight": (1, 32),
    }
    found = facts(layer)
    assert (found.router, found.router_bias, found.selection_bias) == ("wg", True, "correction")
    assert (found.shared.path, found.shared.width, found.shared_gate) == ("common", 20, "common_gate")


def test_a_gate_that_no_name_tells_is_not_certain() -> None:
    names = (("left", (12, 32)), ("right", (12, 32)), ("back", (32, 12)))
    layer = {f"ff.experts.{e}.{name}.weight": shape for e in range(8) for name, shape in names}
    found = facts({**layer, "ff.router.weight": (8, 32)})
    assert found.experts is not None
    assert not found.experts.certain
