"""Layouts that only some families have: fused per expert, packed, lacking, of unit columns, one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_in_mlx_lm
from mlx_lm.utils import quantize_model

from mlx_experts import load_model, save_model
from mlx_experts.engine.loading.api import load_with_report
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import Model
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.checkpoint import PerExpert

IDS = mx.array([[3, 17, 42, 9, 5, 64, 23]])


def tiny(name: str, **stated: Any) -> tuple[Model, dict[str, Any]]:
    family = catalog().load(name)
    config = {**tiny_config(family), **stated}
    return build_tiny(family, config), config


def parameters(model: Model) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def write(folder: Path, tensors: dict[str, mx.array], config: dict[str, Any]) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))


def same(got: dict[str, mx.array], want: dict[str, mx.array]) -> bool:
    return set(got) == set(want) and all(mx.array_equal(got[n], v).item() for n, v in want.items())


def test_gate_and_up_fused_in_each_expert_are_cut_in_the_declared_order() -> None:
    model, _ = tiny("hunyuan_v1_moe")
    layouts = model.converter.spec.experts
    index = next(i for i, each in enumerate(layouts) if isinstance(each, PerExpert) and each.fused)
    want = parameters(model)
    disk = model.converter.export(want, index)
    fused = disk["model.layers.0.mlp.experts.1.gate_and_up_proj.weight"]
    up = want["model.layers.0.mlp.switch_mlp.up_proj.weight"][1]
    assert mx.array_equal(fused[: up.shape[0]], up).item()
    assert same(model.convert(disk).tensors, want)


def test_queries_keys_and_values_grouped_by_key_head_are_taken_apart() -> None:
    model, config = tiny("hunyuan_v1_moe")
    want = parameters(model)
    base = "model.layers.0.self_attn"
    disk = {
        n: v for n, v in want.items() if not n.startswith(f"{base}.") or "layernorm" in n or "o_proj" in n
    }
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (want[f"{base}.{n}_proj.weight"] for n in "qkv")
    parts = [
        part.reshape(groups, count, -1, q.shape[-1]) for part, count in ((q, heads // groups), (k, 1), (v, 1))
    ]
    disk[f"{base}.qkv_proj.weight"] = mx.concatenate(parts, axis=1).flatten(0, 2)
    assert same(model.convert(disk).tensors, want)


def test_layers_that_share_projections_keep_caches_and_key_norms_of_their_own() -> None:
    model, _ = tiny("hunyuan_v1_moe", use_cla=True, cla_share_factor=2)
    names = set(parameters(model))
    assert "model.layers.0.self_attn.k_proj.weight" in names
    assert "model.layers.1.self_attn.k_proj.weight" not in names
    assert "model.layers.1.self_attn.key_layernorm.weight" in names
    cache = make_prompt_cache(model)
    assert len(cache) == len(model.layers)
    pieces = mx.concatenate([model(IDS[:, :4], cache=cache), model(IDS[:, 4:], cache=cache)], axis=1)
    assert mx.allclose(pieces, model(IDS), atol=1e-4).item()


def test_full_precision_and_packed_experts_of_one_name_are_told_apart_when_shapes_agree() -> None:
    # Twice the expert width equals the model's: a square matrix shows nothing.
    model, _ = tiny("gpt_oss", hidden_size=64, intermediate_size=32)
    want = parameters(model)
    disk = model.converter.export(want, 0)
    assert disk["model.layers.0.mlp.experts.gate_up_proj"].shape[-2:] == (64, 64)
    assert same(model.convert(disk).tensors, want)


def test_parameters_that_converters_throw_away_are_zero_and_the_load_says_so(tmp_path: Path) -> None:
    model, config = tiny("ernie4_5_moe")
    kept = {n: v for n, v in parameters(model).items() if not n.endswith("e_score_correction_bias")}
    write(tmp_path, kept, config)
    loaded, _, report = load_with_report(tmp_path)
    biases = [v for n, v in parameters(loaded).items() if n.endswith("e_score_correction_bias")]
    assert biases
    assert all(not mx.any(bias).item() for bias in biases)
    assert any("e_score_correction_bias" in notice and "zero" in notice for notice in report.notices)


def test_a_model_without_such_parameters_lacks_none() -> None:
    model, _ = tiny("ernie4_5_moe", moe_layer_start_index=99)
    assert not any(name.endswith("e_score_correction_bias") for name in parameters(model))
    assert not model.convert(parameters(model)).missing


def test_checkpoint_that_lacks_some_of_what_it_may_lack_is_refused(tmp_path: Path) -> None:
    model, config = tiny("ernie4_5_moe")
    kept = parameters(model)
    del kept[next(n for n in kept if n.endswith("e_score_correction_bias"))]
    write(tmp_path, kept, config)
    with pytest.raises(TensorError, match="1 parameters without a tensor"):
        load_model(tmp_path)


def test_head_tied_to_the_embedding_may_have_a_bias() -> None:
    model, _ = tiny("ernie4_5_moe", use_bias=True, tie_word_embeddings=True)
    before = model(IDS)
    bias = mx.arange(before.shape[-1], dtype=mx.float32)
    change = bias - model.lm_head.bias
    model.update(tree_unflatten([("lm_head.bias", bias)]))
    assert mx.allclose(model(IDS), before + change, atol=1e-3).item()


def test_columns_of_a_normalised_head_have_length_one_however_often_it_is_carried() -> None:
    model, _ = tiny("bailing_moe", norm_head=True)
    once = model.convert(parameters(model)).tensors
    lengths = mx.linalg.norm(once["lm_head.weight"], axis=0)
    assert mx.allclose(lengths, mx.ones_like(lengths), atol=1e-4).item()
    assert same(model.convert(once).tensors, once)


def test_experts_are_written_one_by_one_where_mlx_lm_reads_them_so(tmp_path: Path) -> None:
    model, config = tiny("dbrx")
    attention = {"clip_qkv": 2.0, "rope_theta": config["rope_theta"], **config["attn_config"]}
    config = {**config, "attn_config": attention}
    model = build_tiny(catalog().load("dbrx"), config)
    quantised, config = quantize_model(model, config, 32, 4)
    save_model(tmp_path, quantised, config)
    names = set(mx.load(str(tmp_path / "model.safetensors")))
    assert "transformer.blocks.0.ffn.experts.1.w1.scales" in names
    assert not any("switch_mlp" in name for name in names)
    theirs, _ = load_in_mlx_lm(tmp_path)
    assert mx.allclose(theirs(IDS), quantised(IDS), atol=1e-3).item()
    ours, _, report = load_with_report(tmp_path)
    # One model runs on the CPU's kernels and the other, changed after it was built, on MLX's products.
    assert mx.allclose(ours(IDS), quantised(IDS), atol=1e-5).item()
    assert not report.notices


def test_quantisation_entry_of_one_expert_reaches_the_stacked_module() -> None:
    model, _ = tiny("dbrx")
    modules = model.converter.modules("transformer.blocks.1.ffn.experts.3.w2")
    assert modules == ["transformer.blocks.1.ffn.switch_mlp.down_proj"]
    router = "transformer.blocks.1.ffn.router.layer"
    assert model.converter.modules(router) == [router]


def test_experts_of_unequal_shapes_are_named_before_anything_is_stacked() -> None:
    model, _ = tiny("qwen3_moe")
    disk = model.converter.export(parameters(model), 0)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    disk[name] = disk[name][:-1]
    with pytest.raises(TensorError, match="not of one shape in all experts"):
        model.convert(disk)
