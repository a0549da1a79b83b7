"""Habits of the tools that write checkpoints: extras, absences, other names, and two words for one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from representatives import tiny_plan

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.engine.weights.spellings import find_selection_bias
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import ConfigError, QuantizationError, RegistryError, TensorError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.values import Ref

Tensors = dict[str, mx.array]


def plain(name: str) -> bool:
    return catalog().load(name).backbone is None


FAMILIES = [name for name in catalog().names() if plain(name)]


def biased(name: str) -> bool:
    plan = tiny_plan(name)
    bias = plan.layers[plan.moe_layers[0]].moe.router.selection_bias
    return bias is not None and bias.enabled


def gptq(tensors: Tensors, only: Any) -> tuple[Tensors, Tensors]:
    """Matrices as GPTQ stores them, four bits in groups of 32, and the values that they stand for."""
    stored, values = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not only(name) or weight.ndim != 2:
            continue
        rows, columns = weight.shape
        base = name.removesuffix("weight")
        groups = weight.reshape(rows, columns // 32, 32)
        scale = mx.max(mx.abs(groups), axis=-1) / 7
        q = mx.clip(mx.round(groups / scale[..., None]), -8, 7)
        values[name] = (q * scale[..., None]).reshape(rows, columns)
        words = (q.reshape(rows, columns) + 8).astype(mx.uint32).T.reshape(columns // 8, 8, rows)
        shift = mx.arange(0, 32, 4, dtype=mx.uint32)
        del stored[name]
        stored[f"{base}qweight"] = mx.sum(words << shift[:, None], axis=1).view(mx.int32)
        stored[f"{base}qzeros"] = mx.full((columns // 32, rows // 8), 0x77777777, mx.uint32).view(mx.int32)
        stored[f"{base}scales"] = mx.contiguous(scale.T)
        stored[f"{base}g_idx"] = mx.arange(columns, dtype=mx.int32) // 32
    return stored, values


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.report("C5")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_gptqs_biases_of_zeros_are_ignored_and_counted_and_others_refused(
    name: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    disk = model.converter.export(lab.parameters(model), 0)

    def only(n):
        return (
            n.endswith(".weight")
            and ("self_attn" in n or "experts" in n)
            and "norm" not in n
            and "kv_b" not in n
        )

    stored, values = gptq(disk, only)
    quantised = [n.removesuffix("qweight") for n in stored if n.endswith("qweight")]
    zeros = {f"{base}bias": mx.zeros((8,)) for base in quantised if f"{base}bias" not in stored}
    config |= {"quantization_config": GPTQ}
    folder = lab.write(tmp_path / "zeros", stored | zeros, config)
    loaded, _, report = lab.load(folder)
    truth, _, _ = lab.load(lab.write(tmp_path / "values", values, {**config, "quantization_config": None}))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    counted = report.ignored["biases of zeros that the model does not have"]
    # Experts are stacked first, and a stack counts as one.
    assert 0 < counted <= len(zeros)
    assert inspect_checkpoint(Checkpoint.open(folder)).ignored == report.ignored
    odd = next(iter(zeros))
    with pytest.raises(TensorError, match=r"bias"):
        lab.load(lab.write(tmp_path / "odd", stored | zeros | {odd: mx.ones((8,))}, config))


def nvfp4(tensors: Tensors, maker: str, only: Any) -> tuple[Tensors, list[str]]:
    stored, scales = dict(tensors), []
    for name, weight in tensors.items():
        if not only(name) or weight.ndim != 2:
            continue
        base = name.removesuffix(".weight")
        packed, blocks = mx.quantize(weight, group_size=16, bits=4, mode="nvfp4")
        del stored[name]
        as_bytes = mx.view(packed, mx.uint8)
        if maker == "modelopt":
            stored |= {name: as_bytes, f"{name}_scale": blocks, f"{name}_scale_2": mx.array(1.0)}
            scales.append(f"{name}_scale_2")
        else:
            stored |= {f"{name}_packed": as_bytes, f"{name}_scale": blocks}
            stored[f"{base}.weight_global_scale"] = mx.array([1.0])
            scales.append(f"{base}.weight_global_scale")
    return stored, scales


@pytest.mark.report("C3")
@pytest.mark.parametrize("which", ["all", "one layer's"])
@pytest.mark.parametrize(
    ("maker", "entry"),
    [
        ("modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("compressed", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    ],
)
def test_nvfp4_without_its_global_scales_is_refused_by_name(
    maker: str, entry: Any, which: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny("qwen3_moe")
    disk = model.converter.export(lab.parameters(model), 0)
    stored, scales = nvfp4(disk, maker, lambda n: ".mlp.experts." in n)
    config |= {"quantization_config": entry}
    assert lab.load(lab.write(tmp_path / "whole", stored, config))[0]
    gone = scales if which == "all" else [n for n in scales if ".layers.1." in n]
    rest = {n: v for n, v in stored.items() if n not in gone}
    folder = lab.write(tmp_path / "gone", rest, config)
    with pytest.raises(
        QuantizationError, match=r"layers\.\d+\.mlp\.experts.*scale for the whole|no scale for"
    ):
        lab.load(folder)
    assert not inspect_checkpoint(Checkpoint.open(folder)).loadable


@pytest.mark.report("C3")
@pytest.mark.parametrize(
    ("entry", "lacks"),
    [
        ({**GPTQ, "desc_act": True}, "g_idx"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "a": {"weights": {"num_bits": 4, "group_size": 32, "type": "int", "symmetric": False}}
                },
            },
            "zero_point",
        ),
    ],
)
def test_what_the_config_says_is_stored_must_be_stored(
    entry: dict[str, Any], lacks: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny("qwen3_moe")
    disk = model.converter.export(lab.parameters(model), 0)
    stored, _ = gptq(disk, lambda n: n.endswith("o_proj.weight"))
    if lacks == "zero_point":
        name = "model.layers.0.self_attn.o_proj.weight"
        rows, columns = disk[name].shape
        stored = dict(disk)
        del stored[name]
        stored[f"{name}_packed"] = mx.zeros((rows, columns // 8), mx.int32)
        stored[f"{name}_scale"] = mx.ones((rows, columns // 32))
    stored = {n: v for n, v in stored.items() if not n.endswith(lacks)}
    with pytest.raises(QuantizationError, match=lacks):
        lab.load(lab.write(tmp_path, stored, {**config, "quantization_config": entry}))


@pytest.mark.report("C8")
@pytest.mark.parametrize("name", FAMILIES)
def test_stacked_experts_are_found_under_every_container_that_tools_use(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    want = lab.parameters(model)
    for spelled in (
        "switch_mlp",
        "switch_glu",
        "experts.switch_mlp",
        "mlp.switch_mlp",
        "mlp.experts.switch_glu",
    ):
        disk = dict(want)
        for i in model.plan.moe_layers:
            stack = model.converter.stack(i)
            for leaf in range(len(stack.leaves)):
                old, new = stack.module(leaf), f"{stack.layer}.{spelled}.{stack.leaves[leaf]}"
                for each in [n for n in disk if n.startswith(f"{old}.")]:
                    disk[new + each.removeprefix(old)] = disk.pop(each)
                assert model.converter.modules(new) == [old], spelled
        converted = model.convert(disk)
        assert lab.same(converted.tensors, model.convert(want).tensors) == [], spelled


@pytest.mark.report("C9")
@pytest.mark.parametrize("name", [n for n in FAMILIES if biased(n) and n != "ernie4_5_vl_moe"])
def test_the_selection_bias_is_found_in_every_place_that_files_keep_it(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    want = lab.parameters(model)
    for spelled in (
        "e_score_correction_bias",
        "expert_bias",
        "gate.e_score_correction_bias",
        "gate.expert_bias",
        "router.expert_bias",
        "moe_statics.e_score_correction_bias",
    ):
        disk = dict(want)
        for i in model.plan.moe_layers:
            layer = model.plan.layers[i]
            block = f"{model.converter.layers}.{i}.{layer.moe.path}".rstrip(".")
            own = f"{block}.{layer.moe.router.selection_bias.path}"
            # Layers that route by a table of tokens have no bias.
            if own in disk:
                disk[f"{block}.{spelled}"] = disk.pop(own)
        got = model.convert(disk).tensors
        assert got.keys() == want.keys(), spelled
        assert all(mx.array_equal(got[n], want[n]).item() for n in want if n.endswith("bias")), spelled


def test_two_selection_biases_of_one_router_are_both_left_alone(lab: Any) -> None:
    model, _ = lab.tiny("minimax_m2")
    layer = model.plan.layers[model.plan.moe_layers[0]]
    tensors = {f"l.block_sparse_moe.{n}": mx.ones((8,)) for n in ("expert_bias", "gate.expert_bias")}
    before = dict(tensors)
    find_selection_bias(layer, "l", tensors)
    assert tensors.keys() == before.keys()


@pytest.mark.report("C10")
@pytest.mark.parametrize("first", ["own", "alias"])
def test_a_modules_own_entry_wins_over_one_under_another_name(first: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    own = "model.layers.0.self_attn.o_proj"
    stored, _ = lab.pack(lab.parameters(model), 8, 64, only=lambda n: n == f"{own}.weight")
    entries = {own: {"bits": 8, "group_size": 64}, f"language_model.{own}": {"bits": 4, "group_size": 32}}
    if first == "alias":
        entries = dict(reversed(entries.items()))
    config["quantization"] = {"bits": 4, "group_size": 32, **entries}
    _, _, report = lab.load(lab.write(tmp_path, stored, config))
    assert report.notices == []
    assert {str(found) for found in report.formats.values()} == {"affine 8-bit group 64"}


@pytest.mark.report("C11")
def test_a_backbone_family_follows_what_its_text_config_declares(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("kimi_k3")
    experts = lambda n: ".switch_mlp." in n  # noqa: E731
    stored, _ = lab.pack(lab.parameters(model), 4, 32, "mxfp4", only=experts)
    entry = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config.setdefault("text_config", {})["quantization_config"] = entry
    _, _, report = lab.load(lab.write(tmp_path, stored, config))
    assert {str(found) for found in report.formats.values()} == {"mxfp4 4-bit group 32"}
    assert not [n for n in report.notices if "does not say" in n]


@pytest.mark.report("C12")
def test_an_entry_without_a_mode_is_said_to_have_none(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    stored, _ = lab.pack(lab.parameters(model), 4, 32, "mxfp4", only=lambda n: ".switch_mlp." in n)
    config["quantization"] = {"bits": 4, "group_size": 32}
    _, saved, report = lab.load(lab.write(tmp_path, stored, config))
    said = " ".join(report.notices)
    assert "no mode" in said
    assert "affine" not in said
    assert saved["quantization"]["mode"] == "mxfp4"


@pytest.mark.report("C7")
@pytest.mark.parametrize("name", [n for n in FAMILIES if isinstance(catalog().load(n).head.tied, Ref)])
def test_a_missing_head_names_the_key_that_decides_and_what_it_says(
    name: str, lab: Any, tmp_path: Path
) -> None:
    family = catalog().load(name)
    keys = dict.fromkeys((key for key in family.head.tied.keys if "." not in key), False)
    stated = {**keys, **({family.text_keys[0]: keys} if family.text_config else {})}
    model, config = lab.tiny(name, stated)
    if model.plan.head.tied:
        pytest.skip("the tiny model is tied whatever the keys say")
    head = f"{model._head}."
    rest = {n: v for n, v in lab.parameters(model).items() if not n.startswith(head)}
    folder = lab.write(tmp_path, rest, config)
    with pytest.raises(RegistryError) as caught:
        lab.load(folder)
    said = str(caught.value)
    assert family.head.tied.keys[0] in said
    assert "says false" in said
    assert any(
        family.head.tied.keys[0] in notice for notice in inspect_checkpoint(Checkpoint.open(folder)).notices
    )


@pytest.mark.report("C6")
@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False), (True, True), (False, False)])
def test_glm4v_moe_is_tied_where_either_setting_says_so(outer: bool, inner: bool) -> None:
    """configuration_glm4v_moe.py of transformers 5.24."""
    family = catalog().load("glm4v_moe")
    config = tiny_config(family)
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, inner
    assert resolve(family, config).head.tied is (outer or inner)


@pytest.mark.report("C14")
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_that_are_configured_one_by_one_are_refused_in_words(name: str) -> None:
    family = catalog().load(name)
    if any(key.startswith("block_configs.") for key in family.config.num_experts.keys):
        pytest.skip("reads the settings of each block")
    config = tiny_config(family)
    level = config[family.text_keys[0]] if family.text_config else config
    level["block_configs"] = [{"block_type": "moe", "num_experts": 4}]
    with pytest.raises(ConfigError, match="block_configs"):
        resolve(family, config)


@pytest.mark.report("C15")
@pytest.mark.parametrize(
    "model_type",
    [
        "aria_text", "deepseek_v41_text", "ernie4_5_vl_moe_text", "gemma4_text", "glm4v_moe_text",
        "llama4_text", "qwen3_5_moe_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text",
    ],
)  # fmt: skip
def test_the_text_half_of_a_model_loads_by_its_own_type(model_type: str, lab: Any, tmp_path: Path) -> None:
    family = catalog().for_config({"model_type": model_type})
    model, config = lab.tiny(family.family)
    flat = dict(config)
    for key in family.text_keys:
        flat |= flat.pop(key, None) or {}
    flat = {k: v for k, v in flat.items() if not k.endswith("_config")} | {"model_type": model_type}
    names, wrapper = family.names, f"{family.names.wrapper}." if family.names.wrapper else ""
    tensors = {
        n.replace(f"{wrapper}{names.root}.", "model.", 1).removeprefix(wrapper): v
        for n, v in lab.parameters(model).items()
    }
    loaded, _, _ = lab.load(lab.write(tmp_path, tensors, flat))
    assert lab.distance(lab.logits(loaded), lab.logits(model)) < 1e-5
