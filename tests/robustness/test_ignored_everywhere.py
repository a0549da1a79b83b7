"""Rotary buffers and prediction heads, which any checkpoint may carry, are ignored in every wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import TensorError

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
ROTARY = (
    "model.layers.{i}.self_attn.rotary_emb.inv_freq",
    "model.language_model.layers.{i}.attention.rotary_emb.inv_freq",
    "language_model.model.rotary_emb.inv_freq",
    "transformer.rotary_pos_emb.inv_freq",
    "model.rotary_emb.full_attention_inv_freq",
    "model.layers.{i}.self_attn.rotary_emb.cos_cached",
    "model.layers.{i}.self_attn.rotary_emb.sin_cached",
)
HEADS = (
    "mtp.",
    "model.mtp.",
    "model.language_model.mtp.",
    "language_model.model.mtp.",
    "language_model.mtp_",
)


@pytest.mark.report("C1", "C2")
@pytest.mark.parametrize("name", FAMILIES)
def test_rotary_buffers_and_prediction_heads_are_ignored_and_counted(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    want = lab.parameters(model)
    extra = {rule.format(i=i): mx.ones((8,)) for rule in ROTARY for i in range(2)}
    extra |= {
        f"{head}{rest}": mx.zeros((3, 5), mx.uint32)
        for head in HEADS
        for rest in ("fc.weight", "layers.0.mlp.experts.0.gate_proj.weight", "norm.scales")
    }
    converted = model.convert({**want, **extra})
    assert lab.same(converted.tensors, model.convert(want).tensors) == []
    assert sum(converted.ignored.values()) == len(extra)


@pytest.mark.report("C1", "C2")
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "kimi_k3", "deepseek_v41"])
def test_loading_and_inspecting_ignore_and_count_the_same(name: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny(name)
    extra = {"model.mtp.fc.weight": mx.ones((8, 8)), "mtp.norm.weight": mx.ones((8,))}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.ones((8,))
    folder = lab.write(tmp_path, {**lab.parameters(model), **extra}, config)
    loaded, _, report = lab.load(folder)
    assert sum(report.ignored.values()) == 3
    assert inspect_checkpoint(Checkpoint.open(folder)).ignored == report.ignored
    assert lab.distance(lab.logits(loaded), lab.logits(model)) < 1e-5


@pytest.mark.report("C1")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_5_moe"])
def test_a_tensor_inside_a_layer_is_no_prediction_head(name: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny(name)
    odd = f"{model.converter.layers}.0.mtp_gate.weight"
    with pytest.raises(TensorError, match=r"mtp_gate"):
        lab.load(lab.write(tmp_path, {**lab.parameters(model), odd: mx.ones((8,))}, config))
