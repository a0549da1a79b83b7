"""Loading and converting fused experts holds little more than one layer beside the result."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

WIDTH, EXPERTS, LAYERS = 256, 64, 4
# Fused gate and up, and down, in bfloat16.
FUSED = EXPERTS * 2 * WIDTH * WIDTH * 2
LAYER = FUSED + FUSED // 2


@contextmanager
def peak_above(before: int) -> Iterator[list[int]]:
    """Bytes that were held at the worst moment, less ``before``."""
    found: list[int] = []
    gc.collect()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    yield found
    found.append(mx.get_peak_memory() - start - before)


@pytest.fixture(scope="module")
def fused(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, mx.array]]:
    stated = {
        "hidden_size": WIDTH,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_hidden_layers": LAYERS,
        "mlp_layer_types": ["sparse"] * LAYERS,
    }
    model, config = lab.tiny("qwen3_moe", stated)
    narrow = {name: value.astype(mx.bfloat16) for name, value in lab.parameters(model).items()}
    disk = model.converter.export(narrow, 1)
    assert disk["model.layers.0.mlp.experts.gate_up_proj"].nbytes == FUSED
    return lab.write(tmp_path_factory.mktemp("fused"), disk, config), narrow


@pytest.mark.report("LAY-12")
def test_a_load_holds_at_most_one_fused_tensor_beside_the_model(lab: Any, fused: Any) -> None:
    with peak_above(0) as peak:
        model, _, _ = lab.load(fused[0], dtype="bfloat16")
    held = sum(value.nbytes for value in lab.parameters(model).values())
    assert peak[0] - held < 1.1 * FUSED


@pytest.mark.report("LAY-12")
def test_converting_layer_by_layer_holds_at_most_one_layer_beside_the_result(lab: Any, fused: Any) -> None:
    with peak_above(0) as peak:
        model, _, _ = lab.load(fused[0], dtype="bfloat16", lazy=True)
        for layer in model.layers:
            nn.quantize(layer, 64, 4)
            for _, value in tree_flatten(layer.parameters()):
                mx.eval(value)
    result = sum(v.nbytes for layer in model.layers for _, v in tree_flatten(layer.parameters()))
    assert result < LAYERS * LAYER * 0.3
    assert peak[0] - result < LAYER
    up = fused[1]["model.layers.2.mlp.switch_mlp.up_proj.weight"]
    want = mx.quantize(up, group_size=64, bits=4)[0]
    assert mx.array_equal(model.layers[2].mlp.switch_mlp.up_proj.weight, want).item()
