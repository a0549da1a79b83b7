"""Drafts from every carried case pass the fast check, and those of regular families load and are right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.drafts.draft import draft_family
from mlx_experts.engine.tools.reference_cases import all_views, measure
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checks.static_check import check_fast
from mlx_experts.registry.errors import TensorError

CASES = Path(__file__).parents[2] / "cases"
HUB = [view.case for view in all_views(CASES) if view.name == "hub"]
ODD = {"muse_spark"}


def written(folder: Path, case: Path, exclude: tuple[str, ...] = ()) -> Catalog:
    """A catalogue with the draft of a case, written as the command writes it."""
    draft = draft_family(Checkpoint.open(case / "hub"), catalog(), exclude)
    (folder / f"{draft.family}.yaml").write_text(draft.to_yaml())
    made = Catalog([folder])
    assert made.load(draft.family).extends == draft.base
    return made


def name_of(folder: Path) -> str:
    return next(folder.glob("*.yaml")).stem


@pytest.mark.parametrize(
    "case", [c for c in HUB if c.parent.name not in ODD], ids=lambda c: f"{c.parent.name}/{c.name}"
)
def test_a_draft_passes_the_fast_check_and_loads_its_case(case: Path, tmp_path: Path) -> None:
    made = written(tmp_path, case)
    name = name_of(tmp_path)
    assert check_fast(made, [name]).problems == {}
    model, _ = load_model(case / "hub", family=made.load(name))
    assert measure(model, case / "oracle.npz").ok


def test_a_draft_marks_what_it_cannot_know(tmp_path: Path) -> None:
    case = CASES / "hunyuan_v1_moe" / "base"
    draft = draft_family(Checkpoint.open(case / "hub"), catalog(), ("hunyuan_v1_moe", "hunyuan"))
    text = draft.to_yaml()
    assert "# question: which module owns" in text
    assert "query_layernorm" in text
    (tmp_path / f"{draft.family}.yaml").write_text(text)
    made = Catalog([tmp_path])
    assert check_fast(made, [draft.family]).problems == {}
    with pytest.raises(TensorError, match=r"query_layernorm|gate"):
        load_model(case / "hub", family=made.load(draft.family))


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
