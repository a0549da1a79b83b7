"""Evidence files: what was run, on which family text, with what result. The support ladder reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_experts.registry.errors import CheckpointError
from mlx_experts.registry.spec.family import Family

FOLDER = "tests/evidence"
STATES = ("declared", "layouts checked", "parity on synthetic", "parity against the original")


def family_hash(family: Family) -> str:
    """A hash of what a family says, comments and formatting left out."""
    data = family.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def record(path: Path, rows: Mapping[str, Mapping[str, Any]], ran_on: Mapping[str, str]) -> None:
    """Write an evidence file: rows by family, and the versions and device that produced them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"ran_on": dict(ran_on), "families": rows}, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The rows of an evidence file by family; none when there is no such file.

    Raises:
        CheckpointError: the file is not what :func:`record` writes.
    """
    if not path.exists():
        return {}
    try:
        families: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["families"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "an evidence file cannot be read", where=str(path), hint="record it again"
        ) from error
    return families


def state(family: Family, check: Mapping[str, Any], originals: Mapping[str, Any]) -> str:
    """The highest rung of the ladder that evidence for this very text of the family reaches."""
    digest = family_hash(family)
    row, original = check.get(family.family), originals.get(family.family)
    if original is not None and original["hash"] == digest and original["ok"]:
        return STATES[3]
    if row is None or row["hash"] != digest:
        return STATES[0]
    if row["ok"]:
        return STATES[2]
    return STATES[1] if row["layouts_ok"] else STATES[0]
