"""A config key that appears, goes or changes its default is told; the record is of what is installed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks import config_drift
from mlx_experts.registry.errors import CheckFailed, SettingError

RECORD = Path(__file__).parents[2] / "data" / "neighbours.json"


def test_the_record_of_this_repository_is_of_the_installed_neighbours() -> None:
    recorded = config_drift.read_record(RECORD)
    changes = config_drift.drift(recorded["config_keys"], config_drift.installed_keys(Catalog()))
    assert list(map(str, changes)) == []
    assert recorded["versions"] == config_drift.installed_versions()


def test_keys_and_defaults_are_those_of_the_class() -> None:
    from transformers import Qwen3MoeConfig

    keys = config_drift.class_keys("qwen3_moe")
    made = Qwen3MoeConfig()
    assert keys is not None
    assert {name: keys[name] for name in ("num_experts", "norm_topk_prob", "hidden_act")} == {
        name: getattr(made, name) for name in ("num_experts", "norm_topk_prob", "hidden_act")
    }
    nested = config_drift.class_keys("qwen3_vl_moe")
    assert nested is not None
    assert "text_config.num_experts" in nested
    assert config_drift.class_keys("birch_moe") is None


def test_what_changes_is_told_by_type_and_key() -> None:
    was = {"a": {"x": 1, "y": None, "gone": True}, "b": {}}
    now = {"a": {"x": 2, "y": None, "new": []}, "c": {}}
    assert [str(change) for change in config_drift.drift(was, now)] == [
        "a.gone: was true, is absent",
        "a.new: was absent, is []",
        "a.x: was 1, is 2",
        "b: was class, is absent",
        "c: was absent, is class",
    ]
    assert config_drift.drift(was, copy.deepcopy(was)) == []


def test_a_change_fails_and_a_broken_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="1 facts") as caught:
        config_drift.refuse_drift(config_drift.drift({"a": {"x": 1}}, {"a": {"x": 2}}), tmp_path)
    assert "a.x: was 1, is 2" in caught.value.found
    (tmp_path / "record.json").write_text("[]")
    for name in ("record.json", "none.json"):
        with pytest.raises(SettingError, match="cannot be read"):
            config_drift.read_record(tmp_path / name)
