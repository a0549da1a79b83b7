"""Every carried case, in every layout and config spelling, against the original implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import TOLERANCE, View, all_views, measure, read_config
from mlx_experts import load_model
from mlx_experts.registry.catalog import Catalog
from mlx_experts.registry.errors import UnknownFamilyError


def _has_family(view: View) -> bool:
    try:
        Catalog().resolve(read_config(view))
    except UnknownFamilyError:
        return False
    return True


@pytest.mark.parametrize("view", [v for v in all_views() if _has_family(v)], ids=lambda v: v.id)
def test_case_matches_the_original(view: View, tmp_path: Path) -> None:
    model, _ = load_model(view.folder(tmp_path))
    errors = measure(model, view.case)
    assert errors["full"] < TOLERANCE
    assert errors["decode"] < TOLERANCE
    assert errors["split"] < TOLERANCE
    assert errors["tokens"]
