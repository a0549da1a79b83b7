"""The cache of a window and compressed groups: saved and loaded, it goes on as if nothing had happened."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_experts import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.plugins.builtin.compressed_groups import CompressedGroupsCache
from mlx_experts.registry.resolve.tiny_config import tiny_config

IDS = mx.array([[3, 17, 42, 9, 5, 64, 23, 8, 30, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def model() -> Any:
    family = catalog().load("deepseek_v41")
    return build_tiny(family, tiny_config(family))


def continued(model: Any, cache: list[Any], start: int) -> mx.array:
    """Logits of the tokens after ``start``, one by one."""
    return mx.concatenate([model(IDS[:, i : i + 1], cache=cache) for i in range(start, IDS.shape[1])], axis=1)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(1, id="an open group and no closed one"),
        pytest.param(3, id="an open group after a closed one, in the window"),
        pytest.param(6, id="closed groups, past the window"),
        pytest.param(7, id="an open group, past the window"),
    ],
)
def test_a_loaded_cache_continues_with_the_same_logits(model: Any, tokens: int, tmp_path: Path) -> None:
    cache = make_prompt_cache(model)
    mx.eval(model(IDS[:, :tokens], cache=cache))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [type(each) for each in loaded] == [CompressedGroupsCache] * len(model.layers)
    assert [each.nbytes for each in loaded] == [each.nbytes for each in cache]
    assert mx.array_equal(continued(model, loaded, tokens), continued(model, cache, tokens)).item()


def test_a_process_that_has_loaded_the_model_loads_the_cache(model: Any, tmp_path: Path) -> None:
    save_model(tmp_path, model, tiny_config(model.plan.family))
    cache = make_prompt_cache(model)
    mx.eval(model(IDS[:, :5], cache=cache))
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), cache)
    code = (
        "import sys, mlx.core as mx, mlx_experts\n"
        "from mlx_lm.models.cache import load_prompt_cache\n"
        "model, _ = mlx_experts.load_model(sys.argv[1], dtype='float32')\n"
        "cache = load_prompt_cache(sys.argv[1] + '/prompt.safetensors')\n"
        "print(model(mx.array([[4], [6]]), cache=cache).argmax(-1).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(model(mx.array([[4], [6]]), cache=cache).argmax(-1).tolist())


def test_an_empty_cache_is_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    save_prompt_cache(str(tmp_path / "cache.safetensors"), make_prompt_cache(model))
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert all(each.empty() for each in loaded)
    assert mx.array_equal(continued(model, loaded, 0), continued(model, make_prompt_cache(model), 0)).item()


def test_it_computes_what_the_cache_computes_whose_place_it_takes(model: Any) -> None:
    theirs = [LayerCache(each.window_size) for each in make_prompt_cache(model)]
    assert mx.array_equal(continued(model, theirs, 0), continued(model, make_prompt_cache(model), 0)).item()


def test_a_copy_goes_its_own_way(model: Any) -> None:
    cache = make_prompt_cache(model)
    mx.eval(model(IDS[:, :5], cache=cache))
    twin = copy.deepcopy(cache)
    want = continued(model, cache, 5)
    assert [each.offset for each in twin] == [5] * len(twin)
    assert mx.array_equal(continued(model, twin, 5), want).item()
