"""Every spelling of one set of experts that a family declares gives one model; what is incomplete, none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_in_mlx_lm
from representatives import layouts, one_of_each

from mlx_experts import get_model_classes
from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import Model
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.weights.expert_layouts import export_experts, own_fused_layout
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.checkpoint import PerExpert, Stacked

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]


def layouts_of(name: str, kind: type) -> list[tuple[str, int]]:
    experts = catalog().load(name).expert_layouts
    return [(name, i) for i, layout in enumerate(experts) if isinstance(layout, kind)]


PER_EXPERT = [pair for name in FAMILIES for pair in layouts_of(name, PerExpert)]
W123 = [(n, i) for n, i in PER_EXPERT if {"w1", "w2"} <= set(catalog().load(n).expert_layouts[i].projections)]


def shuffled(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The same tensors in an order that says nothing."""
    names = sorted(tensors)
    random.Random(5).shuffle(names)
    return {name: tensors[name] for name in names}


def spelled(lab: Any, model: Model, layout: int | None) -> dict[str, mx.array]:
    """The model in a declared layout, or for None with gate and up joined in the tree's container."""
    params = lab.parameters(model)
    if layout is not None:
        return model.converter.export(params, layout)
    for i in model.plan.moe_layers:
        stack = model.converter.stack(i)
        own = own_fused_layout(stack.container.removeprefix(f"{stack.layer}."))
        export_experts(own, stack, params, model.converter.tree)
    return params


@pytest.mark.report("LAY-01", "LAY-06", "LAY-10", "LAY-13")
@pytest.mark.parametrize("name", one_of_each(layouts, FAMILIES))
def test_every_spelling_of_the_experts_gives_the_same_parameters(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    want, odd = lab.parameters(model), {}
    declared: list[int | None] = list(range(len(model.converter.spec.experts)))
    gated = catalog().load(name).moe.experts.kind == "glu"
    own = model.converter.stack(model.plan.moe_layers[0]).container
    same_name = any(own.endswith(f".{each.path}") for each in model.converter.spec.experts)
    for index in declared + ([None] if gated and not same_name else []):
        layout = model.converter.spec.experts[index] if index is not None else None
        if isinstance(layout, Stacked) and layout.packed:
            continue
        got = model.convert(shuffled(spelled(lab, model, index))).tensors
        if wrong := lab.same(got, want):
            odd[index] = wrong
    assert odd == {}


@pytest.mark.report("LAY-01")
def test_experts_one_by_one_under_a_wrappers_prefix_give_the_logits_of_the_fused_ones(
    lab: Any, tmp_path: Path
) -> None:
    # Twelve experts, so that an order by text (0, 1, 10, 11, 2) would show.
    model, config = lab.tiny("qwen3_5_moe", {"text_config": {"num_experts": 12}})
    per_expert, fused = (
        {
            f"model.language_model.{name.removeprefix('model.')}"
            if name.startswith("model.")
            else name: value
            for name, value in shuffled(model.converter.export(lab.parameters(model), index)).items()
        }
        for index in (0, 1)
    )
    assert "model.language_model.layers.0.mlp.experts.11.gate_proj.weight" in per_expert
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in fused
    want = lab.logits(model)
    for view, tensors in (("one by one", per_expert), ("fused", fused), ("tree", lab.parameters(model))):
        loaded, _, report = lab.load(lab.write(tmp_path / view, tensors, config))
        assert lab.distance(lab.logits(loaded), want) < 1e-6, view
        assert report.notices == []


@pytest.mark.report("LAY-05")
@pytest.mark.parametrize(("name", "index"), PER_EXPERT)
def test_a_missing_expert_is_named_and_nothing_is_consumed(name: str, index: int, lab: Any) -> None:
    model, _ = lab.tiny(name)
    layout = model.converter.spec.experts[index]
    stack = model.converter.stack(model.plan.moe_layers[0])
    disk = model.converter.export(lab.parameters(model), index)
    gone = next(
        n for n in disk if n.endswith(f"{layout.path.split('.')[-1]}.2.{layout.projections[-1]}.weight")
    )
    lacking = {n: v for n, v in disk.items() if n != gone}
    before = dict(lacking)
    with pytest.raises(TensorError) as caught:
        model.convert(lacking)
    assert f"missing for 1 of {stack.experts} experts: 2" in caught.value.found
    assert layout.projections[-1] in caught.value.found
    assert lacking == before


@pytest.mark.report("LAY-05")
def test_a_leaf_that_no_expert_has_is_named(lab: Any) -> None:
    model, _ = lab.tiny("mixtral")
    disk = model.converter.export(lab.parameters(model), 0)
    with pytest.raises(TensorError, match=r"w3\.weight is missing for 8 of 8 experts"):
        model.convert({n: v for n, v in disk.items() if ".w3." not in n})


@pytest.mark.report("LAY-05")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_lenient_load_in_mlx_lm_is_strict_about_experts(name: str, lab: Any, tmp_path: Path) -> None:
    """One expert lacks a matrix, or every layer lacks its stack of down projections."""
    model, config = lab.tiny(name)
    index = next(i for i, e in enumerate(model.converter.spec.experts) if isinstance(e, PerExpert))
    disk = model.converter.export(lab.parameters(model), index)
    one = next(n for n in disk if ".2." in n and n.endswith("weight") and "experts" in n)
    stacked = lab.parameters(model)
    down = tuple(model.converter.stack(i).module(-1) for i in model.plan.moe_layers)
    for view, lacking, what in (
        ("one", {n: v for n, v in disk.items() if n != one}, "not complete"),
        ("stacks", {n: v for n, v in stacked.items() if not n.startswith(down)}, "experts are missing"),
    ):
        folder = lab.write(tmp_path / view, lacking, config)
        with pytest.raises(TensorError, match=what):
            load_in_mlx_lm(folder, strict=False, get_model_classes=get_model_classes)


@pytest.mark.report("LAY-06")
@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
@pytest.mark.parametrize("container", ["switch_glu", "switch_mlp"])
@pytest.mark.parametrize("bits", [None, 4])
def test_stacks_under_either_container_name_give_the_logits_of_the_original(
    name: str, container: str, bits: int | None, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    stored = values = lab.parameters(model)
    if bits is not None:
        stored, values = lab.pack(stored, bits, only=lambda n: "experts." in n)
        config["quantization"] = {"group_size": 32, "bits": bits}
    stored = {n.replace(".switch_glu.", f".{container}."): v for n, v in stored.items()}
    assert any(f".experts.{container}.gate_proj." in n for n in stored)
    loaded, _, report = lab.load(lab.write(tmp_path / "stacks", stored, config))
    raw = model.converter.export(values, 0)
    config.pop("quantization", None)
    original, _, _ = lab.load(lab.write(tmp_path / "raw", raw, config))
    assert lab.distance(lab.logits(loaded), lab.logits(original)) < 1e-5
    assert report.notices == []


def through_one_layer(model: Model, x: mx.array, expert: int) -> np.ndarray:
    """What one expert of the first MoE layer makes of each row of ``x``."""
    i = model.plan.moe_layers[0]
    stack = model.converter.stack(i)
    layer = model.layers[i]
    block = find(layer, model.plan.layers[i].moe.path)
    container = find(layer, stack.container.removeprefix(f"{stack.layer}."))
    picked = mx.full((x.shape[0], 1), expert, dtype=mx.uint32)
    return np.array(ExpertDispatch("x", block.activation)(container, x, picked, mx.ones((x.shape[0], 1))))


def gated(
    x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, one: float, gelu: bool
) -> np.ndarray:
    """``down((up x + one) * silu(gate x))``, or the tanh form of gelu; values are too small for any clamp."""
    g = x @ gate.T
    slope = 2 * (2 / np.pi) ** 0.5 * (1 + 0.044715 * g * g) if gelu else 1.702 if one else 1.0
    return (g / (1 + np.exp(-slope * g)) * (x @ up.T + one)) @ down.T


@pytest.mark.report("LAY-08")
@pytest.mark.parametrize(("name", "index"), W123)
def test_numbered_matrices_are_gate_up_and_down(name: str, index: int, lab: Any) -> None:
    """One expert in numpy, from the tensors as the file names them, gate and up swapped to see it differ."""
    limit = {"swiglu_limit": 1e4} if "swiglu_limit" in tiny_config(catalog().load(name)) else None
    model, config = lab.tiny(name, limit)
    disk = model.converter.export(lab.parameters(model), index)
    up_leaf = "v1" if any(".v1." in n for n in disk) else "w3"
    base = next(n for n in disk if n.endswith(".3.w1.weight")).removesuffix("w1.weight")
    gate, up, down = (np.array(disk[f"{base}{leaf}.weight"]) for leaf in ("w1", up_leaf, "w2"))
    assert gate.shape == up.shape == down.shape[::-1]
    x = mx.random.normal((5, gate.shape[1]), key=mx.random.key(1))
    other = build_tiny(catalog().load(name), config, seed=9)
    other.load_weights(list(other.convert(disk).tensors.items()))
    got = through_one_layer(other, x, 3)
    one = float(name == "minimax_m3_vl")
    gelu = catalog().load(name).moe.experts.activation.name == "gelu_tanh"
    assert lab.distance(got, gated(np.array(x), gate, up, down, one, gelu)) < 1e-5
    assert lab.distance(got, gated(np.array(x), up, gate, down, one, gelu)) > 0.1


@pytest.mark.report("LAY-10")
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen2_moe", "afmoe"])
@pytest.mark.parametrize("packed", [False, True])
def test_split_and_fused_projections_with_a_split_shared_expert_give_equal_logits(
    name: str, packed: bool, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    split = lab.parameters(model)
    if packed:
        split, _ = lab.pack(split, 4, 64, only=lambda n: "switch_mlp" in n or "shared" in n)
        config["quantization"] = {"group_size": 64, "bits": 4}
    assert any("shared" in n and "gate_proj" in n for n in split)
    fused = dict(split)
    for i in model.plan.moe_layers:
        stack = model.converter.stack(i)
        for plane in ("weight", "scales", "biases"):
            if f"{stack.module(-1)}.{plane}" in fused:
                halves = [fused.pop(f"{stack.module(k)}.{plane}") for k in (0, 1)]
                fused[f"{stack.container}.gate_up_proj.{plane}"] = mx.concatenate(halves, axis=1)
    logits = []
    for view, tensors in (("split", split), ("fused", fused)):
        loaded, _, report = lab.load(lab.write(tmp_path / view, tensors, config))
        logits.append(lab.logits(loaded))
        assert report.notices == []
    if not packed:
        logits.append(lab.logits(model))
    assert all(lab.distance(each, logits[0]) < 1e-6 for each in logits)
