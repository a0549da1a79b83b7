"""Families on mlx-lm's own models: original files load, blocks are replaced, and what cannot be is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import _merge_caches
from mlx_lm.models import deepseek_v41
from mlx_lm.models.kimi_k3 import KimiK3SparseMoE
from mlx_lm.utils import load_model as load_in_mlx_lm
from mlx_lm.utils import save_config

from mlx_experts import get_model_classes, load_model, trace
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.loading.api import load_with_report
from mlx_experts.engine.models.factory import build
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import ModelArgs
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import ConfigError, DeviceError, PluginError, RegistryError, SpecError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

IDS = mx.array([[3, 17, 42, 9, 5, 64, 23]])


def tiny(name: str) -> tuple[Any, dict[str, Any]]:
    family = catalog().load(name)
    return family, tiny_config(family)


def write(folder: Path, tensors: dict[str, mx.array], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    save_config(dict(config), folder / "config.json")


def as_bytes(values: mx.array) -> mx.array:
    return mx.array(np.array(values).view(np.uint8))


def original_kimi(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """As released: experts one by one in mxfp4, under another block name, beside a vision tower."""
    disk = {}
    for name, value in tensors.items():
        if ".switch_mlp." not in name:
            disk[name.replace(".mlp.e_score", ".block_sparse_moe.gate.e_score")] = value
            continue
        layer, leaf = name.split(".mlp.switch_mlp.")
        expert = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[leaf]
        packed, scales = mx.quantize(value, group_size=32, bits=4, mode="mxfp4")
        for e in range(value.shape[0]):
            at = f"{layer}.block_sparse_moe.experts.{e}.{expert}"
            disk[f"{at}.weight_packed"] = as_bytes(packed[e])
            disk[f"{at}.weight_scale"] = scales[e]
    disk["vision_tower.patch.weight"] = mx.zeros((4, 4))
    disk["mm_projector.linear.weight"] = mx.zeros((4, 4))
    disk["language_model.model.layers.4.mlp.down_proj.weight"] = mx.zeros((4, 4))
    return disk


def test_released_files_load_with_mlx_lms_logits_and_run_fused(tmp_path: Path) -> None:
    family, config = tiny("kimi_k3")
    disk = original_kimi(dict(tree_flatten(build_tiny(family, config).parameters())))
    write(tmp_path, disk, {**config, "quantization_config": {"quant_method": "mxfp4"}})
    theirs, _ = load_in_mlx_lm(tmp_path)
    ours, _, report = load_with_report(tmp_path)
    want = theirs(IDS)
    assert (mx.abs(ours(IDS) - want).max() < 1e-5 * mx.abs(want).max()).item()
    assert report.ignored == {
        "vision_tower*": 1,
        "mm_projector*": 1,
        "language_model.model.layers.{layer} past the last layer": 1,
    }
    assert {str(found) for found in report.formats.values()} == {"mxfp4 4-bit group 32"}
    trace.reset()
    mx.eval(ours(IDS[:, :1]))
    assert trace.total("fused") == 3


def native_v41(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The authors' names, and their float8 experts with a scale for each 32 by 32 tile."""
    names = {
        "self_attn": "attn", "mlp": "ffn", "input_layernorm": "attn_norm", "q_a_norm": "q_norm",
        "post_attention_layernorm": "ffn_norm", "q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_proj": "wkv",
        "o_a_proj": "wo_a", "o_b_proj": "wo_b", "k_proj": "wk", "e_score_correction_bias": "bias",
    }  # fmt: skip
    disk = {}
    for name, value in tensors.items():
        if ".switch_mlp." in name:
            layer, leaf = name.split(".mlp.experts.switch_mlp.")
            expert = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[leaf]
            for e in range(value.shape[0]):
                at = f"{layer.removeprefix('model.')}.ffn.experts.{e}.{expert}"
                disk[f"{at}.weight"] = mx.to_fp8(value[e])
                disk[f"{at}.scale"] = mx.full(tuple(n // 32 for n in value[e].shape), 127, dtype=mx.uint8)
            continue
        parts = name.removeprefix("model.").split(".")
        if "shared_experts" in parts:
            parts[-2] = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[parts[-2]]
        elif "compressor" in parts:
            parts = [{"kv_norm": "norm", "gate_proj": "wgate", "kv_proj": "wkv"}.get(p, p) for p in parts]
        new = ".".join(names.get(part, part) for part in parts)
        new = (
            new.replace("attn_hc.", "hc_attn_")
            .replace("ffn_hc.", "hc_ffn_")
            .replace("attn.sinks", "attn.attn_sink")
        )
        new = {"lm_head.weight": "head.weight", "embed_tokens.weight": "embed.weight"}.get(new, new)
        disk[new] = value.flatten(0, 1) if "wo_a" in new else value
    disk["vision.proj.weight"] = mx.zeros((4, 4))
    disk["layers.0.ffn.gate.bias_vl"] = mx.zeros((8,))
    return disk


def test_native_names_and_float8_experts_load_with_mlx_lms_logits(tmp_path: Path) -> None:
    family, config = tiny("deepseek_v41")
    model = build_tiny(family, config)
    disk = native_v41(dict(tree_flatten(model.parameters())))
    tiles = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    write(tmp_path, disk, {**config, "quantization_config": tiles})
    theirs, _ = load_in_mlx_lm(tmp_path)
    ours, _, report = load_with_report(tmp_path)
    want = theirs(IDS)
    assert (mx.abs(ours(IDS) - want).max() < 1e-5 * mx.abs(want).max()).item()
    assert report.ignored == {"vision.*": 1, "*.gate.bias_vl": 1}
    assert {str(found) for found in report.formats.values()} == {"mxfp8 8-bit group 32"}
    result = inspect_checkpoint(Checkpoint.open(tmp_path))
    assert result.loadable
    assert result.layers == {"mlx-lm's mixer with experts": 4}


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    family, config = tiny("kimi_k3")
    disk = original_kimi(dict(tree_flatten(build_tiny(family, config).parameters())))
    del disk["language_model.model.layers.2.block_sparse_moe.experts.5.w3.weight_packed"]
    write(tmp_path, disk, config)
    with pytest.raises(RegistryError, match=r"layers\.2\.block_sparse_moe\.experts\.5\.w3"):
        load_model(tmp_path)


def test_mlx_lms_loader_takes_the_class(tmp_path: Path) -> None:
    family, config = tiny("kimi_k3")
    model = build_tiny(family, config)
    write(tmp_path, dict(tree_flatten(model.parameters())), config)
    loaded, _ = load_in_mlx_lm(tmp_path, get_model_classes=get_model_classes)
    assert isinstance(loaded.layers[1].mlp, MoE)
    assert not isinstance(loaded.layers[0].mlp, MoE)
    assert mx.allclose(loaded(IDS), model(IDS), atol=1e-5).item()


def test_a_copy_has_parameters_of_its_own() -> None:
    model = build_tiny(*tiny("kimi_k3"))
    want = model(IDS)
    mx.eval(want)
    twin = copy.deepcopy(model)
    twin.update(tree_unflatten([(k, v * 2) for k, v in tree_flatten(twin.parameters())]))
    assert not mx.allclose(twin(IDS), want, atol=1e-2).item()
    assert mx.allclose(model(IDS), want, atol=1e-6).item()


def test_no_block_of_mlx_lm_is_left_in_the_tree() -> None:
    model = build_tiny(*tiny("kimi_k3"))
    assert not any(isinstance(module, KimiK3SparseMoE) for module in model.modules())


def test_a_block_of_another_class_than_the_file_says_is_refused() -> None:
    family, config = tiny("kimi_k3")
    wrong = family.model_copy(update={"backbone": family.backbone.model_copy(update={"blocks": ("Other",)})})
    with pytest.raises(SpecError, match=r"found: +it is a KimiK3SparseMoE"):
        build(ModelArgs(resolve(wrong, config), config))
    none = family.backbone.model_copy(update={"module": "no_such_model"})
    with pytest.raises(SpecError, match="no such model"):
        build(ModelArgs(resolve(family.model_copy(update={"backbone": none}), config), config))


def test_a_cache_that_no_plugin_offers_is_refused() -> None:
    family, config = tiny("deepseek_v41")
    other = family.backbone.model_copy(update={"cache": "compressed_group"})
    with pytest.raises(PluginError, match="did you mean 'compressed_groups'"):
        build(ModelArgs(resolve(family.model_copy(update={"backbone": other}), config), config))


def test_what_the_notes_say_that_mlx_lms_model_cannot_do() -> None:
    """Its gathers have no gradient towards their indices, and its rows stand at one position."""
    family, config = tiny("deepseek_v41")
    assert any("training" in note for note in family.notes)
    assert any("batch_generate" in note for note in family.notes)
    theirs = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(config))
    for model in (theirs, build_tiny(family, config)):
        with pytest.raises(ValueError, match="Cannot calculate VJP with respect to indices"):
            nn.value_and_grad(model, lambda m: m(IDS).sum())(model)
        with pytest.raises(ValueError, match="does not yet support batching"):
            _merge_caches([model.make_cache(), model.make_cache()])


def test_a_config_that_mlx_lm_refuses_is_an_error_of_the_config() -> None:
    family, config = tiny("kimi_k3")
    config["text_config"]["hidden_act"] = "relu"
    with pytest.raises(ConfigError, match="Unsupported activation 'relu'"):
        build(ModelArgs(resolve(family, config), config))


@pytest.mark.skipif(mx.metal.is_available(), reason="a machine with Metal builds it")
def test_a_model_that_needs_metal_and_has_no_stand_ins_says_so() -> None:
    family, config = tiny("muse_spark")
    assert family.backbone is not None
    bare = family.model_copy(update={"backbone": family.backbone.model_copy(update={"fallbacks": None})})
    with pytest.raises(DeviceError, match="runs on Apple GPUs only"):
        build(ModelArgs(resolve(bare, config), config))
