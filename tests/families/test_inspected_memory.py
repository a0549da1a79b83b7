"""What `registry inspect` says that weights will take, against the loaded model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_experts.engine.inspection import inspect_checkpoint
from mlx_experts.engine.loading import load_model
from mlx_experts.engine.originals import View, all_views
from mlx_experts.registry.catalog import Catalog
from mlx_experts.registry.checkpoint import Checkpoint

CASES = Path(__file__).parent.parent / "cases"


def _loads_here(view: View) -> bool:
    backbone = Catalog().for_config(view.config()).backbone
    return backbone is None or not backbone.needs_metal or mx.metal.is_available()


def _said_over_loaded(folder: Path) -> float:
    said = inspect_checkpoint(Checkpoint.open(folder)).weight_bytes
    model, _ = load_model(folder)
    return said / sum(value.nbytes for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("view", [v for v in all_views(CASES) if _loads_here(v)], ids=lambda v: v.id)
def test_inspect_foresees_the_memory_of_a_case(view: View) -> None:
    with view.folder() as folder:
        assert _said_over_loaded(folder) == pytest.approx(1.0, abs=0.02)


def test_inspect_foresees_the_memory_of_the_demo() -> None:
    demo = Path(str(files("mlx_experts").joinpath("demo")))
    assert _said_over_loaded(demo) == pytest.approx(1.0, abs=0.02)
