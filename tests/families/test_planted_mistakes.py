"""The mistakes that scripts/mutate_families.py plants, and its list of those that are none."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.catalog.catalog import Catalog, _read_entry
from mlx_experts.registry.catalog.yaml_reader import read_yaml
from mlx_experts.registry.checks.known_names import ACTIVATIONS, CONFIG_NAMES

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import mutations  # noqa: E402

NAMES = catalog().names()
EQUIVALENT = yaml.safe_load((ROOT / "scripts" / "equivalent_mutations.yaml").read_text(encoding="utf-8"))


@functools.cache
def planted(name: str) -> list[tuple[str, str]]:
    """Names and keys of every mistake of a family's file."""
    data, _ = read_yaml(Catalog().path(name))
    return [(each.name, each.key) for each in mutations.mutations(data)]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_written_out_says_the_same_and_no_two_mistakes_share_a_name(name: str, tmp_path: Path) -> None:
    known = Catalog()
    data, _ = read_yaml(known.path(name))
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(mutations.written_out(data), sort_keys=False, width=10**6))
    written = Catalog()
    written.__dict__["entries"] = {**known.entries, name: _read_entry(path)}
    assert written.load(name).model_dump() == known.load(name).model_dump()
    names = [each for each, _ in planted(name)]
    assert len(set(names)) == len(names) > 0


def test_every_mistake_changes_its_file_and_nothing_else() -> None:
    data, _ = read_yaml(Catalog().path("mixtral"))
    before = yaml.safe_dump(data)
    for each in mutations.mutations(data):
        assert each.data != mutations.written_out(data), each.name
    assert yaml.safe_dump(data) == before


def test_steps_that_a_file_joins_are_tried_one_by_one() -> None:
    steps: list[Any] = [{"rename": {"a": "b", "c": "d"}}, {"conv": ["x", "y"]}, {"rename": "e", "to": "f"}]
    got = mutations.written_out({"checkpoint": {"conversions": steps}})["checkpoint"]["conversions"]
    singles = [{"rename": "a", "to": "b"}, {"rename": "c", "to": "d"}, {"conv": "x"}, {"conv": "y"}]
    assert got == [*singles, {"rename": "e", "to": "f"}]


def test_every_activation_has_another_to_be_mistaken_for() -> None:
    for name in {*ACTIVATIONS, *CONFIG_NAMES}:
        other = mutations._NEXT_ACTIVATION[CONFIG_NAMES.get(name, name)]
        assert other in ACTIVATIONS
        assert CONFIG_NAMES.get(name, name) != other


def test_what_is_listed_as_no_mistake_is_still_planted_and_has_a_reason() -> None:
    keys = {name: {key for _, key in planted(name)} for name in NAMES}
    for group in EQUIVALENT["listed"]:
        assert len(group["reason"].split()) > 3
        for name, listed in group["mutations"].items():
            assert set(listed) <= keys[name], sorted(set(listed) - keys[name])
    for each in EQUIVALENT["patterns"]:
        assert len(each["reason"].split()) > 3
        pattern = re.compile(each["pattern"])
        assert any(pattern.fullmatch(key) for found in keys.values() for key in found), each["pattern"]
