"""``max_kv_size`` bounds what mlx-lm would bound, to the same tokens, and is refused in words elsewhere."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from dense_checkpoint import DEMO
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model as load_in_mlx_lm
from representatives import mixers, one_of_each

import mlx_experts
from mlx_experts import load_model
from mlx_experts.engine.loading import generate as generation
from mlx_experts.engine.loading.doors import Doors, open_doors
from mlx_experts.engine.loading.prompt_caches import unbounded
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.resolve.tiny_config import tiny_config

CASES = Path(__file__).parent.parent.parent / "cases"
FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]


@functools.cache
def tiny(name: str) -> Any:
    family = catalog().load(name)
    return build_tiny(family, tiny_config(family))


def plain(model: Any) -> bool:
    """Whether every layer keeps all keys and values, and nothing but them."""
    caches = make_prompt_cache(model)
    return len(caches) == len(model.layers) and all(type(cache) is KVCache for cache in caches)


@pytest.mark.parametrize("name", one_of_each(mixers, FAMILIES))
def test_a_bound_that_is_not_reached_changes_nothing_and_one_that_is_holds(name: str) -> None:
    model = tiny(name)
    ids = mx.array([[5, 3, 8, 1, 9, 2, 7, 4, 6, 11]])
    caches = make_prompt_cache(model, max_kv_size=6)
    if unbounded(model, 6) is not None:
        assert [type(c) for c in caches] == [type(c) for c in make_prompt_cache(model)]
        return
    assert [(type(c), c.max_size, c.keep) for c in caches] == [(RotatingKVCache, 6, 4)] * len(model.layers)
    want = model(ids)
    wide = make_prompt_cache(model, max_kv_size=32)
    got = mx.concatenate([model(ids[:, i : i + 1], cache=wide) for i in range(ids.shape[1])], axis=1)
    assert mx.abs(got - want).max().item() < 1e-4 * mx.abs(want).max().item()
    for i in range(ids.shape[1]):
        mx.eval(model(ids[:, i : i + 1], cache=caches))
    assert all(cache.keys.shape[2] <= 6 and cache.offset == ids.shape[1] for cache in caches)


@pytest.mark.parametrize("name", one_of_each(mixers, FAMILIES))
@pytest.mark.report("T1")
def test_where_mlx_lm_bounds_the_caches_these_are_bounded_too(name: str) -> None:
    """And in the families that mlx-lm lacks, wherever all caches are plain."""
    family = catalog().load(name)
    try:
        source = importlib.import_module(f"mlx_lm.models.{family.model_types[0]}")
    except ModuleNotFoundError:
        source = None
    model = tiny(name)
    if plain(model) and not any(getattr(layer.mixer, "chunk", None) for layer in model.plan.layers):
        assert unbounded(model, 8) is None
    elif source is not None and not hasattr(source.Model, "make_cache"):
        # What this package describes as a window or a state keeps its bound.
        assert "does not bound" in str(unbounded(model, 8))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "glm4_moe"])
def test_past_the_bound_the_tokens_are_mlx_lms(name: str) -> None:
    folder = CASES / name / "base" / "hub"
    prompt = mx.array([5, 3, 8, 1, 9, 2, 7, 4, 6, 11, 12, 13])
    both = [
        [token for token, _ in generate_step(prompt, model, max_tokens=12, max_kv_size=8)]
        for model in (load_model(folder)[0], load_in_mlx_lm(folder)[0])
    ]
    assert both[0] == both[1]


def test_a_hybrid_model_says_what_its_caches_keep(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("qwen3_next")
    reason = unbounded(model, 16)
    assert reason is not None
    assert "a state of fixed size" in reason
    assert "every token" in reason
    told: list[str] = []
    with open_doors(Doors(tell=told.append)):
        make = importlib.import_module("mlx_lm.chat").make_prompt_cache
        make(model, 16)
        make(model, 16)
        make(model)
    assert told == [reason]
    with caplog.at_level(logging.WARNING, logger="mlx_experts"):
        generation.stream_generate(model, None, [1, 2, 3], max_tokens=1, max_kv_size=16)
    assert [record.getMessage() for record in caplog.records] == [reason]


@pytest.mark.parametrize("size", [4, 0, -3])
def test_a_bound_that_leaves_no_place_is_refused_through_every_door(size: int) -> None:
    model, tokenizer = mlx_experts.load(DEMO)
    with pytest.raises(SettingError, match="holds nothing beside"):
        mlx_experts.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=2, max_kv_size=size)
    with open_doors(Doors(tell=lambda text: None)), pytest.raises(SettingError, match="holds nothing beside"):
        list(mlx_lm.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=2, max_kv_size=size))
