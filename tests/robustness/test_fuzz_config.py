"""Any value in any config.json ends in a model that runs or in one clear error.

Every run tries the same few examples; `pytest --hypothesis-profile long` goes looking for new ones.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.tiny_config import config_keys

FAMILIES = [
    name
    for name in catalog().names()
    if (backbone := catalog().load(name).backbone) is None or not backbone.metal_only
]
# What loading takes beside the tensors themselves: headers, frequencies, positions.
ROOM = 192_000_000

NUMBERS = (
    st.sampled_from([-1, 0, 1, 2, 3, 5, 7, 64, 96, 2**24, 2**31 - 1, 2**31, 2**63, 10**30, -(2**31)])
    | st.integers()
    | st.sampled_from([0.0, 0.5, -1.5, 1e-30, 1e308, math.nan, math.inf, -math.inf])
    | st.floats()
)
PLAIN = (
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "4", "silu", "x" * 300]) | st.text(max_size=4)
)
ROPE = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope", 3, "x"]),
        "factor": PLAIN,
        "original_max_position_embeddings": PLAIN,
        "rope_theta": PLAIN,
        "beta_fast": PLAIN,
        "low_freq_factor": NUMBERS,
        "high_freq_factor": NUMBERS,
        "mscale": PLAIN,
        "mscale_all_dim": PLAIN,
        "short_factor": st.lists(NUMBERS, max_size=9),
        "long_factor": st.lists(PLAIN, max_size=9),
        "full_attention": st.dictionaries(st.text(max_size=3), PLAIN, max_size=2),
    },
)
VALUES = (
    PLAIN
    | ROPE
    | st.lists(PLAIN | st.lists(PLAIN, max_size=2), max_size=5)
    | st.dictionaries(st.sampled_from(["from", "default", "a"]) | st.text(max_size=3), PLAIN, max_size=3)
)


def paths(config: dict[str, Any], above: str = "") -> Iterator[str]:
    """Dotted keys of a config, nested ones too."""
    for key, value in config.items():
        yield above + key
        if isinstance(value, dict):
            yield from paths(value, f"{above}{key}.")


@st.composite
def edited(draw: st.DrawFn, value: Any) -> Any:
    """Something near a value: another sign, size, type or length, or anything at all."""
    if isinstance(value, list) and draw(st.booleans()):
        items = [*value]
        where = draw(st.integers(0, max(len(items) - 1, 0)))
        return draw(
            st.sampled_from(
                [
                    items[:-1],
                    items * 5,
                    [*items, draw(VALUES)],
                    [*items[:where], draw(VALUES), *items[where + 1 :]],
                ]
            )
        )
    if isinstance(value, int | float) and not isinstance(value, bool) and draw(st.booleans()):
        near = [-value, value * 2, value + 1, value - 1, float(value), str(value), [value], value * 1_000_003]
        return draw(st.sampled_from([*near, [value] * 4, value / 3]))
    if isinstance(value, str) and draw(st.booleans()):
        return draw(st.sampled_from([f"{value}x", value[:-1], value.upper(), [value], {value: value}]))
    return draw(VALUES)


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """A family and what changes in its tiny config; an ellipsis stands for a key that is removed."""
    name = draw(st.sampled_from(FAMILIES))
    family, config = catalog().load(name), CONFIGS[name]
    keys = {*paths(config), *config_keys(family)}
    keys |= {f"{family.text_keys[0]}.{key}" for key in config_keys(family)} if family.text_config else set()
    chosen = draw(st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=3))
    return name, [(key, draw(st.just(...) | edited(at(config, key)))) for key in chosen]


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def change(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for part in parents:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config.pop(leaf, None)
    if value is not ...:
        config[leaf] = value


CONFIGS: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def checkpoints(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tensors of every family's tiny model, in a folder by its name."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in FAMILIES:
        model, config = lab.tiny(name)
        lab.write(folder / name, lab.parameters(model), config)
        CONFIGS[name] = config
    return folder


def _tries(folder: Path) -> None:
    """Everything that a person does with a checkpoint: look, load, read a prompt, write a token."""
    inspect_checkpoint(Checkpoint.open(folder))
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    ids = mx.array([[1, 2, 3, 4, 5]])
    mx.eval(model(ids, cache=cache))
    mx.eval(model(ids[:, :1], cache=cache))


def test_any_config_gives_a_model_that_runs_or_an_error(checkpoints: Path, lab: Any, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    folder.mkdir()

    @given(edits())
    def holds(example: tuple[str, list[tuple[str, Any]]]) -> None:
        name, changes = example
        config = copy.deepcopy(CONFIGS[name])
        for key, value in changes:
            change(config, key, value)
        tensors = folder / "model.safetensors"
        tensors.unlink(missing_ok=True)
        tensors.symlink_to(checkpoints / name / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with lab.within(20), suppress(RegistryError):
            _tries(folder)
        assert mx.get_peak_memory() - before < 16 * tensors.stat().st_size + ROOM

    holds()


def test_a_config_that_is_refused_is_your_error(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**CONFIGS["olmoe"], "hidden_size": -4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoints / "olmoe" / "model.safetensors")
    for command in (["inspect", str(tmp_path)], ["generate", str(tmp_path), "--prompt", "x"]):
        assert run(command) == 1
        error = capsys.readouterr().err
        assert "hidden_size" in error
        assert "Traceback" not in error
