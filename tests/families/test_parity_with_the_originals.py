"""Every carried case, in every layout and config spelling, against the original implementation."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels import cpu
from mlx_experts.engine.originals import TOLERANCE, View, all_views, measure_view
from mlx_experts.engine.trace import trace
from mlx_experts.registry.catalog import Catalog
from mlx_experts.registry.errors import DeviceError
from mlx_experts.registry.resolve import resolve

CASES = Path(__file__).parent.parent / "cases"


VIEWS = all_views(CASES)
# The farthest of all views is 1e-5, so that less is needed here than of a user's comparison.
CLOSE = 3e-5


def _lacks_metal(view: View) -> bool:
    backbone = Catalog().for_config(view.config()).backbone
    return backbone is not None and backbone.needs_metal and not mx.metal.is_available()


@pytest.mark.parametrize("view", [v for v in VIEWS if not _lacks_metal(v)], ids=lambda v: v.id)
def test_case_matches_the_original(view: View) -> None:
    trace.reset()
    errors = measure_view(view)
    assert errors.full < CLOSE < TOLERANCE
    assert errors.decode < CLOSE
    assert errors.split < CLOSE
    assert errors.tokens
    # Rows that were decoded alone went through the fused kernel, so that it is held to the original too.
    # Experts that read weighted inputs make one token several rows.
    plan = resolve(Catalog().for_config(view.config()), view.config())
    fused = [p for p in plan.layers if p.moe and (p.moe.experts.weigh == "output" or p.sizes.top_k == 1)]
    assert (trace.total("fused") > 0) == bool(fused)
    assert trace.total("gather", rows="1") == 0


def test_a_fused_kernel_that_is_nearly_right_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a percent off passes the trial before first use, and not the comparison with the original."""
    right = cpu.FusedExperts.__call__
    monkeypatch.setattr(cpu.FusedExperts, "__call__", lambda self, *token: right(self, *token) * 1.005)
    errors = measure_view(View(CASES / "mixtral" / "base", "hub"))
    assert errors.decode > TOLERANCE
    assert not errors.ok
    assert errors.full < CLOSE


def test_every_case_is_met_as_the_hub_has_it() -> None:
    cases = {case.parent for case in CASES.glob("*/*/case.json")}
    assert {view.case for view in VIEWS if view.name == "hub"} == cases
    assert cases


@pytest.mark.skipif(mx.metal.is_available(), reason="a machine with Metal runs every case")
def test_a_machine_without_metal_is_told_what_a_case_needs() -> None:
    needing = [view for view in VIEWS if _lacks_metal(view)]
    assert {view.case.parent.name for view in needing} == {"muse_spark"}
    for view in needing:
        with pytest.raises(DeviceError, match="expected: Metal"):
            measure_view(view)
