"""Every carried case, in every layout and config spelling, against the original implementation."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_experts.engine.originals import TOLERANCE, View, all_views, measure_view
from mlx_experts.registry.catalog import Catalog
from mlx_experts.registry.errors import DeviceError, UnknownFamilyError

CASES = Path(__file__).parent.parent / "cases"


def _has_family(view: View) -> bool:
    try:
        Catalog().resolve(view.config())
    except UnknownFamilyError:
        return False
    return True


VIEWS = [v for v in all_views(CASES) if _has_family(v)]


def _lacks_metal(view: View) -> bool:
    backbone = Catalog().for_config(view.config()).backbone
    return backbone is not None and backbone.needs_metal and not mx.metal.is_available()


@pytest.mark.parametrize("view", [v for v in VIEWS if not _lacks_metal(v)], ids=lambda v: v.id)
def test_case_matches_the_original(view: View) -> None:
    errors = measure_view(view)
    assert errors.full < TOLERANCE
    assert errors.decode < TOLERANCE
    assert errors.split < TOLERANCE
    assert errors.tokens


@pytest.mark.skipif(mx.metal.is_available(), reason="a machine with Metal runs every case")
def test_a_machine_without_metal_is_told_what_a_case_needs() -> None:
    needing = [view for view in VIEWS if _lacks_metal(view)]
    assert {view.case.parent.name for view in needing} == {"muse_spark"}
    for view in needing:
        with pytest.raises(DeviceError, match="expected: Metal"):
            measure_view(view)
