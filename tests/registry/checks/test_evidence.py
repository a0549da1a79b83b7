"""The rungs of the support ladder, and that the repository's evidence is of the families' present text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks import evidence
from mlx_experts.registry.errors import CheckpointError

FOLDER = Path(__file__).parents[3] / evidence.FOLDER
MIXTRAL = Catalog().load("mixtral")
NOW = evidence.family_hash(MIXTRAL)
CHECKED = {"hash": NOW, "ok": True, "layouts_ok": True}
COMPARED = {"hash": NOW, "ok": True}


@pytest.mark.parametrize(
    ("check", "original", "rung"),
    [
        (None, None, "declared"),
        ({**CHECKED, "ok": False, "layouts_ok": False}, None, "declared"),
        ({**CHECKED, "hash": "of an older text"}, None, "declared"),
        ({**CHECKED, "ok": False}, None, "layouts checked"),
        (CHECKED, None, "parity on synthetic"),
        (CHECKED, {**COMPARED, "ok": False}, "parity on synthetic"),
        (CHECKED, {**COMPARED, "hash": "of an older text"}, "parity on synthetic"),
        (None, COMPARED, "parity against the original"),
        (CHECKED, COMPARED, "parity against the original"),
    ],
)
def test_a_family_stands_on_the_rung_of_its_evidence(
    check: dict[str, Any] | None, original: dict[str, Any] | None, rung: str
) -> None:
    rows = [{} if row is None else {"mixtral": row} for row in (check, original)]
    assert evidence.state(MIXTRAL, *rows) == rung


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "check.json"
    assert evidence.read(path) == {}
    evidence.record(path, {"mixtral": CHECKED}, {"mlx": "0"})
    assert evidence.read(path) == {"mixtral": CHECKED}
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="record it again"):
        evidence.read(path)


def test_the_hash_follows_what_a_file_says_and_not_how() -> None:
    qwen, again = (Catalog().load("qwen3_moe") for _ in range(2))
    assert evidence.family_hash(qwen) == evidence.family_hash(again) != NOW


def test_every_family_has_evidence_of_its_present_text() -> None:
    """Else record again: `registry check --record` and `registry parity --originals tests/cases --record`."""
    catalog = Catalog()
    check, originals = (evidence.read(FOLDER / name) for name in ("check.json", "originals.json"))
    states = {name: evidence.state(catalog.load(name), check, originals) for name in catalog.names()}
    lacking = {name for name, state in states.items() if state in evidence.STATES[:2]}
    assert lacking == set()
    assert [name for name in originals if states[name] != evidence.STATES[3]] == []


RECEIPTS = sorted(FOLDER.glob("receipt-*.json"))


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_a_receipt_names_its_machine_and_what_ran(path):
    receipt = json.loads(path.read_text(encoding="utf-8"))
    assert {"mlx", "mlx-lm", "device", "date"} <= receipt["ran_on"].keys()
    assert receipt["trials"]
    assert receipt["trusted"] == all(t["agrees"] for t in receipt["trials"] if t["error"] is not None)


def test_documents_say_that_no_metal_device_ran_this_until_a_receipt_stands_here():
    metal = [p for p in RECEIPTS if json.loads(p.read_text(encoding="utf-8"))["device"] == "metal"]
    for page in ("README.md", "docs/benchmarks.md"):
        text = (FOLDER.parents[1] / page).read_text(encoding="utf-8").lower()
        assert ("no metal device has run this code" in text) == (not metal), page
