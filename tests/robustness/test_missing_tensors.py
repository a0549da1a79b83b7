"""No tensor is lost or left at its initial value: on the way in, on the way out, and between shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.utils import load_model as load_in_mlx_lm
from mlx_lm.utils import quantize_model

from mlx_experts import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.weights.audit import audit
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import CheckpointError, ConfigError, TensorError
from mlx_experts.registry.spec import layer_rules as rules
from mlx_experts.registry.spec.checkpoint import Stacked
from mlx_experts.registry.spec.values import Ref

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
MODES = [
    ("affine", 1, 32),
    ("affine", 3, 64),
    ("affine", 4, 32),
    ("affine", 6, 64),
    ("affine", 8, 32),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


@pytest.mark.report("DRP-01")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_value_goes_out_in_every_layout_and_comes_back(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    want = lab.parameters(model)
    for index, layout in enumerate(model.converter.spec.experts):
        if getattr(layout, "packed", None):
            continue
        back = model.convert(model.converter.export(want, index)).tensors
        audit(want, back).check(name)
        assert lab.same(back, want) == []


@pytest.mark.report("DRP-01")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_5_moe", "dbrx", "nemotron_h"])
def test_no_expert_of_a_converted_checkpoint_is_a_fresh_one(name: str, lab: Any, tmp_path: Path) -> None:
    """Written in a layout, loaded, written as this package writes, loaded again."""
    model, config = lab.tiny(name)
    want = lab.parameters(model)
    fresh = lab.parameters(build_tiny(catalog().load(name), config, seed=3))
    first, saved, _ = lab.load(lab.write(tmp_path / "one", model.converter.export(want, 0), config))
    save_model(tmp_path / "two", first, saved)
    converted = lab.parameters(lab.load(tmp_path / "two")[0])
    experts = {
        n for i in model.plan.moe_layers for n in want if n.startswith(model.converter.stack(i).container)
    }
    assert experts
    for n in experts:
        assert mx.array_equal(converted[n], want[n]).item()
        differs = mx.any(converted[n] != fresh[n], axis=tuple(range(1, want[n].ndim)))
        assert differs.all().item(), n


@pytest.mark.report("DRP-01")
@pytest.mark.parametrize("name", FAMILIES)
def test_writing_a_layout_from_tensors_that_lack_a_projection_is_an_error(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    module = model.converter.stack(model.plan.moe_layers[-1]).module(-1)
    lacking = {n: v for n, v in lab.parameters(model).items() if not n.startswith(module)}
    for index in range(len(model.converter.spec.experts)):
        with pytest.raises(TensorError, match="not complete") as caught:
            model.converter.export(lacking, index)
        assert caught.value.where == module


@pytest.mark.report("DRP-01")
def test_tensors_under_names_that_the_model_does_not_have_are_refused(lab: Any, tmp_path: Path) -> None:
    """A writer that stacks what the schema wants one by one, and the reverse of it."""
    model, config = lab.tiny("mixtral")
    renamed = {n.replace("switch_mlp", "stacked_experts"): v for n, v in lab.parameters(model).items()}
    with pytest.raises(TensorError) as caught:
        lab.load(lab.write(tmp_path, renamed, config))
    assert "12 parameters without a tensor" in caught.value.found
    assert "12 tensors that no rule claims" in caught.value.found
    assert "stacked_experts.down_proj.weight (4 tensors)" in caught.value.found


@pytest.mark.report("DRP-03")
@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
@pytest.mark.parametrize("name", ["gpt_oss", "dbrx", "qwen3_5_moe"])
def test_shards_hold_every_plane_bit_by_bit(
    name: str, mode: str, bits: int, group: int, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mlx_lm.utils.make_shards
    monkeypatch.setattr(
        mlx_lm.utils,
        "make_shards",
        lambda weights: [part for n, v in weights.items() for part in whole({n: v})],
    )
    model, config = lab.tiny(name)
    stored, _ = lab.pack(lab.parameters(model), bits, group, mode)
    config["quantization"] = {"group_size": group, "bits": bits, "mode": mode}
    model, config, _ = lab.load(lab.write(tmp_path / "one", stored, config))
    want = lab.parameters(model)
    assert any(n.endswith(".scales") and ("experts" in n or "switch" in n) for n in want)
    save_model(tmp_path / "shards", model, config)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 20
    again, _, report = lab.load(tmp_path / "shards")
    assert lab.same(lab.parameters(again), want) == []
    # No fused kernel takes 1-bit weights, which is said wherever there is one.
    said = "got gate in affine 1-bit"
    assert [notice for notice in report.notices if bits != 1 or said not in notice] == []
    listed = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(v.nbytes for v in model.converter.written(want).values()) == sum(
        info.nbytes for info in Checkpoint.open(tmp_path / "shards").tensors.values()
    )
    assert set(listed) == set(model.converter.written(want))


@pytest.mark.report("DRP-03")
def test_scales_of_whole_experts_survive_a_save_here_and_in_mlx_lm(lab: Any, tmp_path: Path) -> None:
    family = catalog().load("qwen3_moe")
    mlx_lm_needs = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    }
    _, config = lab.tiny("qwen3_moe", mlx_lm_needs)
    model, config = quantize_model(build_tiny(family, config), config, 16, 4, "nvfp4", global_scale=True)
    save_model(tmp_path, model, config)
    again, saved, report = lab.load(tmp_path)
    assert sum(n.endswith(".global_scale") for n in lab.parameters(again)) == 9
    assert lab.same(lab.parameters(again), lab.parameters(model)) == []
    assert report.notices == []
    save_model(tmp_path / "again", again, saved)
    theirs, _ = load_in_mlx_lm(tmp_path / "again")
    # mlx-lm multiplies with such scales on GPUs only.
    assert lab.same(lab.parameters(theirs), lab.parameters(model)) == []


@pytest.mark.report("DRP-05")
@pytest.mark.parametrize("command", [["inspect"], ["generate", "--prompt", "x"]])
def test_an_absent_shard_is_named_before_any_tensor(
    command: list[str], lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = lab.tiny("glm4_moe")
    params = lab.parameters(model)
    cut = sorted(params)[: len(params) // 2]
    lab.write(tmp_path, params, config)
    (tmp_path / "model.safetensors").unlink()
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    mx.save_safetensors(str(tmp_path / first), {n: params[n] for n in cut})
    weight_map = {n: first if n in cut else second for n in params}
    index = tmp_path / "model.safetensors.index.json"
    for text in (json.dumps({"weight_map": weight_map}), None):
        if text is None:
            index.unlink()
        else:
            index.write_text(text)
        assert run([command[0], str(tmp_path), *command[1:]]) == 1
        err = capsys.readouterr().err
        assert "Shards of the checkpoint are absent" in err
        assert f"no {second}" in err
        assert "layers" not in err


@pytest.mark.report("DRP-05")
def test_a_stale_shard_beside_the_set_is_never_merged(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("glm4_moe")
    params = lab.parameters(model)
    stale = {n: v + 1 for n, v in params.items() if "layers.1" in n}
    lab.write(tmp_path, params, config)
    mx.save_safetensors(str(tmp_path / "model-old.safetensors"), stale)
    with pytest.raises(CheckpointError, match="One tensor is in two files"):
        lab.load(tmp_path)
    index = {"weight_map": dict.fromkeys(params, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded, _, report = lab.load(tmp_path)
    assert lab.same(lab.parameters(loaded), params) == []
    assert any("model-old.safetensors" in notice for notice in report.notices)


def with_a_dense_layer(name: str, config: dict[str, Any], layer: int) -> dict[str, Any] | None:
    """The config with one MoE layer made dense, where a rule of the family can say so."""
    family = catalog().load(name)
    at = next((config[key] for key in family.text_keys if key in config), config)
    count = at.get("num_hidden_layers", config.get("num_hidden_layers"))
    for rule in family.moe.layers:
        if isinstance(rule, rules.ListRule):
            at[rule.key] = [int(i > layer) for i in range(count)]
            return config
        if isinstance(rule, rules.FirstDense) and isinstance(rule.first, Ref):
            at[rule.first.keys[0]] = layer + 1
            return config
        if isinstance(rule, rules.SparseStep):
            at[rule.dense] = list(range(layer + 1))
            return config
    return None


def may_be_dense(name: str) -> bool:
    family = catalog().load(name)
    told = any(
        isinstance(rule, rules.ListRule | rules.SparseStep)
        or (isinstance(rule, rules.FirstDense) and isinstance(rule.first, Ref))
        for rule in family.moe.layers
    )
    return told and family.dense is not None


def shares_names(model: Any, dense: Any, layer: int, lab: Any) -> bool:
    """Whether a layer's dense MLP bears the names of joined experts, so that shapes alone tell them apart."""
    at, tensors = f"{model.converter.layers}.{layer}", lab.parameters(dense)
    joined = (each for each in model.converter.layouts if isinstance(each, Stacked))
    return any(f"{at}.{each.path}.{each.fused}{each.suffix}" in tensors for each in joined)


@pytest.mark.report("DRP-10")
@pytest.mark.parametrize("name", [name for name in FAMILIES if may_be_dense(name)])
def test_a_dense_mlp_is_never_built_over_experts_nor_experts_over_a_dense_mlp(name: str, lab: Any) -> None:
    """The config decides for each layer, and the tensors must bear it out."""
    model, config = lab.tiny(name)
    layer = model.plan.moe_layers[0]
    dense, _ = lab.tiny(name, with_a_dense_layer(name, config, layer))
    assert layer not in dense.plan.moe_layers
    for built, disk in ((dense, model), (model, dense)):
        with pytest.raises(TensorError) as caught:
            audit(lab.parameters(built), built.convert(lab.parameters(disk)).tensors).check(name)
        if disk is dense and shares_names(model, dense, layer, lab):
            assert "has shape" in caught.value.found
            continue
        assert "without a tensor" in caught.value.found
        assert "no rule claims" in caught.value.found


@pytest.mark.report("DRP-10")
@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_experts_on_disk_of_a_config_that_switches_them_off_are_refused(
    name: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    at = config.get("text_config", config)
    assert at.pop("enable_moe_block") is True
    at["num_experts"] = 8
    with pytest.raises(TensorError, match="no rule claims"):
        lab.load(lab.write(tmp_path, lab.parameters(model), config))


@pytest.mark.report("DRP-10")
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe", "llama4"])
def test_a_family_of_experts_takes_no_config_without_them(name: str, lab: Any) -> None:
    with pytest.raises(ConfigError, match="a layer with experts has none"):
        lab.tiny(name, {"text_config": {"num_experts": 0, "num_local_experts": 0}})
