"""Every carried case, in every layout and config spelling, against the original implementation."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_experts.engine.originals import TOLERANCE, View, all_views, measure_view
from mlx_experts.registry.catalog import Catalog
from mlx_experts.registry.errors import UnknownFamilyError

CASES = Path(__file__).parent.parent / "cases"


def _has_family(view: View) -> bool:
    try:
        Catalog().resolve(view.config())
    except UnknownFamilyError:
        return False
    return True


VIEWS = [v for v in all_views(CASES) if _has_family(v)]


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.id)
def test_case_matches_the_original(view: View) -> None:
    errors = measure_view(view)
    assert errors.full < TOLERANCE
    assert errors.decode < TOLERANCE
    assert errors.split < TOLERANCE
    assert errors.tokens
