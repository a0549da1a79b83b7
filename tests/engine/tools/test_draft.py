"""Drafts from every carried case pass the fast check, and those of regular families load and are right."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.drafts.draft import draft_family
from mlx_experts.engine.tools.reference_cases import all_views, measure
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checks.static_check import check_fast
from mlx_experts.registry.resolve.planner import resolve

CASES = Path(__file__).parents[2] / "cases"
HUB = list({v.case.parent.name: v.case for v in reversed(all_views(CASES)) if v.name == "hub"}.values())
ODD = {"muse_spark"}


def written(folder: Path, case: Path, exclude: tuple[str, ...] = ()) -> Catalog:
    """A catalogue with the draft of a case, written as the command writes it."""
    draft = draft_family(Checkpoint.open(case / "hub"), catalog(), exclude)
    (folder / f"{draft.family}.yaml").write_text(draft.to_yaml())
    made = Catalog([folder])
    assert made.load(draft.family).extends == (draft.base or None)
    return made


def name_of(folder: Path) -> str:
    return next(folder.glob("*.yaml")).stem


# One of four, since `scripts/draft_trial.py` tries them all; EVERY_FAMILY=1 does here.
TRIED = [c for c in HUB if c.parent.name not in ODD][:: 1 if os.environ.get("EVERY_FAMILY") else 4]


@pytest.mark.parametrize("case", TRIED, ids=lambda c: f"{c.parent.name}/{c.name}")
def test_a_draft_passes_the_fast_check_and_loads_its_case(case: Path, tmp_path: Path) -> None:
    made = written(tmp_path, case)
    name = name_of(tmp_path)
    assert check_fast(made, [name]).problems == {}
    model, _ = load_model(case / "hub", family=made.load(name))
    assert measure(model, case / "oracle.npz").ok


def test_a_draft_marks_what_it_cannot_know(tmp_path: Path) -> None:
    case = CASES / "hunyuan_v1_moe" / "base"
    draft = draft_family(Checkpoint.open(case / "hub"), catalog(), ("hunyuan_v1_moe", "hunyuan"))
    (tmp_path / f"{draft.family}.yaml").write_text(draft.to_yaml())
    made = Catalog([tmp_path])
    assert check_fast(made, [draft.family]).problems == {}
    model, _ = load_model(case / "hub", family=made.load(draft.family))
    # Its norms stand behind the rotation, which nothing states.
    assert not measure(model, case / "oracle.npz").ok
    asked = {path for question in draft.asked for path in question.paths}
    assert {"attention.qk_norm", "attention.rope", "moe.router.score", "moe.router.renormalize"} <= asked


def test_a_tensor_that_nothing_explains_is_asked_for(tmp_path: Path) -> None:
    case = CASES / "qwen3_moe" / "base"
    tensors = mx.load(str(case / "hub" / "model.safetensors"))
    tensors["model.layers.0.self_attn.odd.weight"] = mx.ones((3, 5))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    shutil.copy(case / "hub" / "config.json", tmp_path)
    draft = draft_family(Checkpoint.open(tmp_path), catalog())
    assert "# question: which module owns model.layers.0.self_attn.odd.weight?" in draft.to_yaml()
    (asked,) = (question for question in draft.asked if "odd" in question.text)
    assert "attention" in asked.paths


def test_no_constant_of_the_base_stands_in_a_draft(tmp_path: Path) -> None:
    """exaone_moe's scale of 2.5 and windows of 4096 are its own."""
    case = CASES / "exaone_moe" / "base" / "hub"
    config = json.loads((case / "config.json").read_text())
    silent = (
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "layer_types",
        "sliding_window",
        "norm_topk_prob",
    )
    config = {k: v for k, v in config.items() if k not in silent and k != "sliding_window_pattern"}
    config |= {"model_type": "exaone_moee", "architectures": ["Unheard"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to((case / "model.safetensors").resolve())
    draft = draft_family(Checkpoint.open(tmp_path), catalog())
    assert draft.whole is not None
    plan = resolve(draft.whole, config)
    moe = next(layer.moe for layer in plan.layers if layer.moe is not None)
    assert moe.router.scale == 1.0
    assert moe.router.groups is None or moe.router.groups.count == 1
    assert all(layer.mixer.window is None for layer in plan.layers)
    asked = {path for question in draft.asked for path in question.paths}
    assert {"moe.router.scale", "moe.router.groups", "moe.router.renormalize", "attention.window"} <= asked


def test_a_draft_ends_with_one_command_that_checks_it_alone(tmp_path: Path) -> None:
    draft = draft_family(Checkpoint.open(CASES / "olmoe" / "base" / "hub"), catalog())
    assert draft.next_command(tmp_path) == f"registry check {draft.family} --families {tmp_path}"


def test_an_unknown_family_keeps_the_names_of_its_config(tmp_path: Path) -> None:
    case = CASES / "olmoe" / "clip_qkv"
    without = Catalog()
    draft = draft_family(Checkpoint.open(case / "hub"), without, ("olmoe",))
    assert draft.family == "olmoe_draft"
    assert any("already describes" in question for question in draft.questions)


def test_a_base_that_extends_none_is_preferred_where_two_explain_as_much(tmp_path: Path) -> None:
    """Everything that a derived base changes would stand in the draft, wanted or not."""
    shutil.copytree(CASES / "qwen3_moe" / "base" / "hub", tmp_path / "hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    config |= {"model_type": "unheard_of", "architectures": ["UnheardOf"]}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    draft = draft_family(Checkpoint.open(tmp_path / "hub"), catalog())
    assert draft.base == "qwen3_moe"
    assert not {"variants", "layer_types", "checkpoint"} & set(draft.data)


def all_but(*names: str) -> list[str]:
    """Every family except these, for a draft that has few bases to try."""
    return [name for name in catalog().names() if name not in names]


def test_a_gate_on_the_attentions_output_is_told_by_its_shape() -> None:
    others = all_but("exaone_moe", "qwen3_moe", "glm4_moe")
    draft = draft_family(Checkpoint.open(CASES / "afmoe" / "base" / "hub"), catalog(), others)
    assert draft.whole is not None
    gate = draft.whole.attention.gate
    assert (gate.path, gate.over, gate.function) == ("gate_proj", "element", "sigmoid")
    assert any("attention.gate" in question.paths for question in draft.asked)


def test_a_rotated_share_beside_the_rotations_parameters_is_read() -> None:
    checkpoint = Checkpoint.open(CASES / "glm4_moe" / "base" / "hub")
    assert checkpoint.config["partial_rotary_factor"] == 0.5
    draft = draft_family(checkpoint, catalog(), all_but("exaone_moe", "glm4v_moe", "dots1"))
    assert draft.whole is not None
    assert draft.whole.attention.rope.partial.keys == ("partial_rotary_factor",)


def test_bases_are_tried_until_one_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mlx_experts.engine.tools.drafts.draft.TRIED", 1)
    case = CASES / "deepseek_v3" / "base"
    shutil.copytree(case / "hub", tmp_path / "hub")
    # As transformers 5 writes it, which names the sizes of attention that other families need.
    shutil.copy(case / "hub" / "config.transformers.json", tmp_path / "hub" / "config.json")
    nearest = ("axk2", "glm4_moe", "dots3_note", "mistral_large3")
    draft = draft_family(Checkpoint.open(tmp_path / "hub"), catalog(), all_but(*nearest))
    assert not any("where does the checkpoint keep" in question for question in draft.questions)


def test_a_section_that_says_nothing_is_not_in_a_draft() -> None:
    checkpoint = Checkpoint.open(CASES / "mixtral" / "base" / "hub")
    draft = draft_family(checkpoint, catalog(), all_but("qwen3_moe", "minimax_m2"))
    assert {} not in draft.data.values()
    assert not any(path.startswith("dense.") for question in draft.asked for path in question.paths)
