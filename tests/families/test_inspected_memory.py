"""What `registry inspect` says that weights and caches will take, against the loaded model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.loading.api import load_model, save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.engine.tools.reference_cases import View, all_views
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family

CASES = Path(__file__).parent.parent / "cases"


def _runs_here(family: Family) -> bool:
    return family.backbone is None or not family.backbone.metal_only or mx.metal.is_available()


def _said_over_loaded(folder: Path) -> float:
    said = inspect_checkpoint(Checkpoint.open(folder)).weight_bytes
    model, _ = load_model(folder, lazy=True)
    return said / sum(value.nbytes for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    "view", [v for v in all_views(CASES) if _runs_here(catalog().for_config(v.config()))], ids=lambda v: v.id
)
def test_inspect_foresees_the_memory_of_a_case(view: View) -> None:
    with view.folder() as folder:
        assert _said_over_loaded(folder) == pytest.approx(1.0, abs=0.02)


def test_inspect_foresees_the_memory_of_the_demo() -> None:
    demo = Path(str(files("mlx_experts").joinpath("demo")))
    assert _said_over_loaded(demo) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", [n for n in catalog().names() if _runs_here(catalog().load(n))])
def test_inspect_foresees_the_bytes_of_a_cache(name: str, tmp_path: Path) -> None:
    """Of a prompt and one token, around the windows and beyond the steps in which caches grow."""
    family = catalog().load(name)
    config = tiny_config(family)
    model = build_tiny(family, config)
    save_model(tmp_path, model, config)
    checkpoint = Checkpoint.open(tmp_path)
    for context in (3, 20, 301):
        ids = mx.random.randint(0, model.plan.sizes.vocab_size, (1, context), key=mx.random.key(1))
        cache = make_prompt_cache(model)
        for part in (ids[:, :-1], ids[:, -1:]):
            mx.eval(model(part, cache=cache))
        said = inspect_checkpoint(checkpoint, context=context, dtype="float32", family=family).cache_bytes
        assert said == sum(each.nbytes for each in cache), f"{context} tokens"
