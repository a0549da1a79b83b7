"""Drafts of families that are hidden; scripts/draft_trial.py tries every family, and its page keeps that."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "draft-trial.md"
ROW = re.compile(r"\| (\w+)/\w+ \| \w* \| (right|wrong|refused) \| (right|wrong|refused) \| (\d+) \|")
NEWER = re.compile(r"\| (\w+)/\w+ \|.*\| \d+ \| (right|wrong|refused) \| (right|wrong|refused) \|")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draft_trial", ROOT / "scripts" / "draft_trial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draft_trial"] = module
    spec.loader.exec_module(module)
    return module


ROWS = {name: (untouched, answered) for name, untouched, answered, _ in ROW.findall(PAGE.read_text())}
# Every second family; EVERY_FAMILY=1 in the environment tries all.
TRIED = list(ROWS) if os.environ.get("EVERY_FAMILY") else list(ROWS)[1::2]


@pytest.mark.parametrize("family", TRIED)
@pytest.mark.report("M18")
def test_a_hidden_family_is_drafted_as_the_page_says(script: ModuleType, family: str) -> None:
    outcome = script.trial(script.cases_of([family])[0])
    assert (outcome.untouched, outcome.answered) == ROWS[family], outcome.detail
    assert outcome.asked > 0


def test_the_families_that_are_tried_keep_the_bounds() -> None:
    outcomes = [ROWS[name] for name in TRIED]
    assert len(outcomes) >= 20
    assert sum(untouched == "right" for untouched, _ in outcomes) >= 0.6 * len(outcomes)
    assert sum(answered == "right" for _, answered in outcomes) >= 0.9 * len(outcomes)
    assert "wrong" not in {answered for _, answered in outcomes}


@pytest.mark.report("M18")
def test_the_page_has_every_family_and_keeps_the_bounds(script: ModuleType) -> None:
    rows = ROW.findall(PAGE.read_text())
    tried = {name for name, *_ in rows}
    assert len(tried) >= 20
    assert tried <= set(script.described())
    assert sum(untouched == "right" for _, untouched, _, _ in rows) >= 0.6 * len(rows)
    assert sum(answered == "right" for _, _, answered, _ in rows) >= 0.9 * len(rows)
    assert [name for name, _, answered, asked in rows if answered == "wrong" or asked == "0"] == []


def test_configs_as_transformers_5_writes_them_keep_the_bounds(script: ModuleType) -> None:
    rows = NEWER.findall(PAGE.read_text())
    case = {path.parent.name for path in script.cases_of(script.described()) if has_newer(path)}
    assert {name for name, *_ in rows} <= case
    assert len(rows) >= 30
    assert sum(untouched == "right" for _, untouched, _ in rows) >= 0.6 * len(rows)
    assert sum(answered == "right" for _, _, answered in rows) >= 0.9 * len(rows)
    assert "wrong" not in {answered for *_, answered in rows}


def has_newer(case: Path) -> bool:
    return (case / "hub" / "config.transformers.json").is_file()


def test_a_hidden_family_is_hidden_with_all_that_extends_it(script: ModuleType) -> None:
    with (
        script.hidden("glm4_moe") as (catalog, left),
        script.unseen(script.cases_of(["glm4_moe"])[0]) as folder,
    ):
        assert not {"glm4_moe", "dots1", "solar_open"} & set(catalog.names())
        assert {path.stem for path in left.iterdir()} == set(catalog.names())
        config = Checkpoint.open(folder).config
        assert "Glm4MoeForCausalLM" not in config["architectures"]
        assert config["model_type"] == "glm4_moe_unseen"
