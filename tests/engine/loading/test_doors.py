"""Every way by which mlx-lm's tools reach a model leads to this package's loader, and to no other engine."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from dense_checkpoint import DEMO, write_dense
from mlx.utils import tree_flatten
from mlx_lm import utils

from mlx_experts import load, save_model
from mlx_experts.engine.loading.doors import Doors, open_doors, quantize_inputs
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import QuantizationError, SettingError, UnknownFamilyError
from mlx_experts.registry.resolve.tiny_config import tiny_config


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def doors(told: list[str]) -> Doors:
    return Doors(tell=told.append)


TOOLS = ("server", "generate", "chat", "lora", "fuse", "convert", "perplexity", "benchmark", "cache_prompt")


@pytest.mark.parametrize("tool", [*TOOLS, "quant.gptq", "quant.dwq", "quant.awq", "quant.dynamic_quant"])
def test_a_tools_own_names_lead_here_and_back(tool: str, doors: Doors) -> None:
    """Also where the tool was imported before the doors were opened."""
    module = import_module(f"mlx_lm.{tool}")
    before = {name: value for name, value in vars(module).items() if name in ("load", "sharded_load")}
    assert before["load"] is utils.load
    with open_doors(doors):
        assert all(vars(module)[name] == getattr(doors, name) for name in before)
        assert mlx_lm.load == utils.load == doors.load
    assert {name: vars(module)[name] for name in before} == before
    assert mlx_lm.load is before["load"]


def test_modules_that_are_imported_meanwhile_are_given_back_too(doors: Doors) -> None:
    with open_doors(doors):
        sys.modules.pop("mlx_lm.perplexity", None)
        module = import_module("mlx_lm.perplexity")
        assert module.load == doors.load
    assert module.load is utils.load


@pytest.mark.report("T3")
def test_every_door_opens_on_our_model(doors: Doors) -> None:
    with open_doors(doors):
        model, tokenizer, config = utils.load(str(DEMO), {"trust_remote_code": True}, return_config=True)
        other, _ = utils.load_model(DEMO, True)
        spread, _ = utils.sharded_load(str(DEMO), None, mx.distributed.init())
    assert all(isinstance(each, LanguageModel) for each in (model, other, spread))
    ids = mx.array([tokenizer.encode("A mixture")])
    assert mx.array_equal(model(ids), spread(ids)).item()
    assert config["num_experts"] == 16


@pytest.mark.report("T5")
def test_what_a_tool_saves_has_the_dtypes_that_the_checkpoint_has(tmp_path: Path, doors: Doors) -> None:
    """A model computes in float32 on the CPU."""
    with open_doors(doors):
        model, _ = utils.load_model(DEMO)
        utils.save_model(tmp_path, model)
    before, after = (
        {name: each.dtype for name, each in mx.load(str(folder / "model.safetensors")).items()}
        for folder in (DEMO, tmp_path)
    )
    assert after == before


def test_a_dense_model_goes_to_mlx_lm_with_one_notice(tmp_path: Path, doors: Doors, told: list[str]) -> None:
    folder = write_dense(tmp_path / "dense")
    want, _ = utils.load_model(folder)
    with open_doors(doors):
        model, _ = mlx_lm.load(str(folder))
    assert type(model).__module__ == "mlx_lm.models.llama"
    assert mx.array_equal(model(mx.array([[1, 2]])), want(mx.array([[1, 2]]))).item()
    assert [text.removeprefix(f"{folder}: ") for text in told] == [
        "a dense model; it has no experts, and mlx-lm's own engine runs it"
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "strange", "architectures": ["X"], "num_experts": 8}, "num_experts 8"),
        ({"model_type": "strange", "architectures": ["X"], "ffn": {"n_routed_experts": [4, 4]}}, "experts"),
        ({"model_type": "strange", "architectures": ["X"]}, "neither this package nor mlx-lm"),
    ],
)
def test_an_unknown_model_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Path, doors: Doors, told: list[str]
) -> None:
    folder = write_dense(tmp_path / "unknown", **changes)
    with open_doors(doors), pytest.raises(UnknownFamilyError, match=says):
        mlx_lm.load(str(folder))
    assert told == []


def test_tensors_that_are_experts_make_a_model_that_is_not_dense(tmp_path: Path, doors: Doors) -> None:
    folder = write_dense(tmp_path / "odd", model_type="strange", architectures=["X"])
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    with open_doors(doors), pytest.raises(UnknownFamilyError, match=r"experts\.0\.up_proj"):
        mlx_lm.load(str(folder))


def test_mlx_lms_own_engine_is_not_filled_with_experts(doors: Doors) -> None:
    """A tool that kept the old function, or that builds a model itself, is stopped."""
    kept = utils.load_model
    with open_doors(doors):
        with pytest.raises(SettingError, match="mlx-lm's own engine"):
            kept(DEMO)
        module = import_module("mlx_lm.models.dbrx")
        small = {
            "d_model": 8,
            "n_heads": 2,
            "n_layers": 1,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        }
        ffn = {"ffn_hidden_size": 8, "moe_num_experts": 2, "moe_top_k": 1}
        args = module.ModelArgs(model_type="dbrx", vocab_size=8, ffn_config=ffn, **small)
        with pytest.raises(SettingError, match="mlx-lm's own engine"):
            module.Model(args).load_weights([], strict=False)
        with pytest.raises(SettingError, match="mlx-lm's own engine"):
            module.Model(args).update({})
    model, _ = kept(DEMO)
    assert type(model).__module__ == "mlx_lm.models.qwen3_moe"


def test_a_family_on_mlx_lms_own_model_is_loaded_through_the_doors(doors: Doors, tmp_path: Path) -> None:
    """Its inner model is one of mlx-lm's with experts, and is filled by this package."""
    family = catalog().load("kimi_k3")
    config = tiny_config(family)
    model = build_tiny(family, config)
    save_model(tmp_path, model, config)
    ids = mx.array([[3, 1, 2]])
    with open_doors(doors):
        loaded, _ = utils.load_model(tmp_path)
    assert mx.abs(loaded(ids) - model(ids)).max().item() < 1e-5


def test_code_and_foreign_classes_are_refused(doors: Doors) -> None:
    with open_doors(doors):
        with pytest.raises(SettingError, match="never run"):
            utils.load(str(DEMO), trust_remote_code=True)
        with pytest.raises(SettingError, match="classes of its own"):
            utils.load_model(DEMO, get_model_classes=lambda config: (None, None))


def test_what_is_saved_is_in_the_layout_that_the_family_declares(tmp_path: Path, doors: Doors) -> None:
    model, tokenizer, config = load(DEMO, return_config=True, dtype="stored")
    with open_doors(doors):
        utils.save(tmp_path / "saved", str(DEMO), model, tokenizer, config)
    again, _ = load(tmp_path / "saved", dtype="stored")
    original, _ = load(DEMO, dtype="stored")
    assert not [v for _, v in tree_flatten(model.parameters()) if v.size], "the writer was to let go of them"
    for (name, a), (_, b) in zip(
        tree_flatten(again.parameters()), tree_flatten(original.parameters()), strict=True
    ):
        assert a.dtype == b.dtype, name
        assert mx.array_equal(a, b).item(), name


def test_inputs_are_quantised_where_the_format_has_such_a_product() -> None:
    model, _ = load(DEMO)
    with pytest.raises(QuantizationError, match="activations") as caught:
        quantize_inputs(model)
    assert caught.value.found == "affine"
