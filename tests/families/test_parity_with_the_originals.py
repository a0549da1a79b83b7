"""Every carried case, in every layout and config spelling, against the original implementation."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.reference_cases import TOLERANCE, View, all_views, measure_view
from mlx_experts.registry.resolve.planner import resolve

CASES = Path(__file__).parent.parent / "cases"


VIEWS = all_views(CASES)
# The farthest of all views is 1e-5, so that less is needed here than of a user's comparison.
CLOSE = 3e-5


def plan_of(view: View) -> tuple[object, ...]:
    """What decides a view's model beside its tensors."""
    plan = resolve(catalog().for_config(view.config()), view.config())
    return plan.sizes, plan.norm, plan.embedding, plan.head, plan.layers, plan.checkpoint


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.id)
def test_case_matches_the_original(view: View) -> None:
    if view.name == "hub+v5" and plan_of(view) == plan_of(View(view.case, "hub")):
        # The same tensors by the same plan: the model of the view `hub`, as long as it loads.
        with view.folder() as folder:
            load_model(folder, lazy=True)
        return
    trace.reset()
    errors = measure_view(view)
    assert errors.full < CLOSE < TOLERANCE
    assert errors.decode < CLOSE
    assert errors.split < CLOSE
    assert errors.tokens
    # Rows that were decoded alone went through the fused kernel, so that it is held to the original too.
    family = catalog().for_config(view.config())
    kept = family.backbone is not None and family.backbone.kept is not None
    layers = [] if kept else resolve(family, view.config()).layers
    assert (trace.total("fused") > 0) == any(layer.moe for layer in layers)
    assert trace.total("gather", rows="1") == 0


def test_a_fused_kernel_that_is_nearly_right_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a percent off passes the trial before first use, and not the comparison with the original."""
    right = cpu.FusedExperts.__call__
    monkeypatch.setattr(cpu.FusedExperts, "__call__", lambda self, *token: right(self, *token) * 1.005)
    errors = measure_view(View(CASES / "mixtral" / "base", "hub"))
    assert errors.decode > TOLERANCE
    # A prompt's experts run through the same kernel.
    assert errors.full > TOLERANCE
    assert not errors.ok


def test_every_case_is_met_as_the_hub_has_it() -> None:
    cases = {case.parent for case in CASES.glob("*/*/case.json")}
    assert {view.case for view in VIEWS if view.name == "hub"} == cases
    assert cases
