"""What `registry inspect` says of the path of every MoE layer, against the trace of a loaded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.engine.tools.reference_cases import View, all_views
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint

CASES = Path(__file__).parent.parent / "cases"
HUB = [view for view in all_views(CASES) if view.name == "hub"]


def _runs_here(view: View) -> bool:
    backbone = catalog().for_config(view.config()).backbone
    return backbone is None or not backbone.needs_metal or mx.metal.is_available()


@lru_cache(maxsize=1)
def inspected(folder: Path) -> list[dict[str, Any]]:
    """What inspecting tells of every layer and number of rows."""
    return inspect_checkpoint(Checkpoint.open(folder)).paths


@lru_cache(maxsize=1)
def loaded(folder: Path) -> nn.Module:
    return load_model(folder)[0]


def said(folder: Path, rows: int) -> dict[tuple[str, str], int]:
    """Layers by path and rule, as inspecting tells them."""
    found = [row for row in inspected(folder) if row["rows"] == rows]
    return {(row["path"], row["reason"].partition(":")[0]): row["layers"] for row in found}


def taken(folder: Path, rows: int) -> dict[tuple[str, str], int]:
    """The same of calls with this many tokens, as the trace saw them."""
    model = loaded(folder)
    trace.reset()
    mx.eval(model(mx.array([[5]] * rows)))
    # A layer that runs several times is one layer, with shared experts that the router weighs as well.
    rows_seen = [row for row in trace.snapshot() if not row.layer.endswith(".shared")]
    found = {(row.layer, row.path, "" if row.path == "fused" else row.reason) for row in rows_seen}
    counts = dict(Counter(each[1:] for each in found))
    trace.reset()
    return counts


# The rows come first, so that a view is loaded once.
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("view", [view for view in HUB if _runs_here(view)], ids=lambda view: view.id)
def test_inspect_foresees_the_path_of_every_layer(view: View, rows: int) -> None:
    with view.folder() as folder:
        assert said(folder, rows) == taken(folder, rows)


@pytest.fixture
def anew() -> Iterator[None]:
    """Nothing is kept from before, or for later."""
    for kept in (inspected, loaded):
        kept.cache_clear()
    yield
    for kept in (inspected, loaded):
        kept.cache_clear()


@pytest.mark.usefixtures("anew")
def test_a_machine_without_the_kernel_is_told_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: Decline("numba", "numba", "none", "Install it."))
    folder = CASES / "mixtral" / "base" / "hub"
    assert said(folder, 1) == taken(folder, 1) == {("gather", "numba"): 2}
