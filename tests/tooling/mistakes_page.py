"""The table of planted mistakes, which stands on the page of families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import table

from mlx_experts.registry.checks import evidence


def mistakes_section(root: Path) -> str:
    """What scripts/mutate_families.py has recorded, or nothing where no run is recorded."""
    path = root / evidence.FOLDER / "mutations.json"
    if not path.exists():
        return ""
    recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows, caught, planted = [], 0, 0
    for name, row in sorted(recorded.items()):
        noticed = sum(row["noticed"].values())
        whole = noticed + len(row["survivors"])
        caught, planted = caught + noticed, planted + whole
        parts = ", ".join(f"{part} {count}" for part, count in row["noticed"].items())
        rows.append((f"`{name}`", f"{noticed} of {whole}", parts, str(row["equivalent"])))
    step = max((row["every"] for row in recorded.values()), default=1)
    sample = f" This is a sample, of each file at least every mistake in {step}." if step > 1 else ""
    text = (
        "`scripts/mutate_families.py` changes each literal of each file, one at a time, and asks those parts "
        "of the tests that are fast enough: "
        f"{caught} of {planted} are noticed ({caught / max(1, planted):.1%})."
        f"{sample} *Equivalent* counts changes that no checkpoint could show; "
        "`scripts/equivalent_mutations.yaml` has the reasons."
    )
    return f"\n## Planted mistakes\n\n{text}\n\n" + table(("family", "noticed", "by", "equivalent"), rows)
