"""Every family, in each of its layouts, computes the same with half its experts in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import load_model, trace
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import _quantize_experts, build_tiny
from mlx_experts.registry.errors import ConfigError, DeviceError, TensorError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family

CATALOG = catalog()
PROMPT, TOKENS = 7, 2


def written(model: LanguageModel, layout: int | None, config: Mapping[str, Any], folder: Path) -> Path:
    """A checkpoint of the model in one layout."""
    folder.mkdir(exist_ok=True)
    tensors = model.converter.export(dict(tree_flatten(model.parameters())), layout)
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.contiguous(value) for name, value in tensors.items()}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: LanguageModel) -> np.ndarray:
    """Of a prompt, and of tokens one by one."""
    mx.random.seed(7)
    ids = mx.random.randint(0, model.plan.sizes.vocab_size, (1, PROMPT + TOKENS))
    cache = make_prompt_cache(model)
    found = [model(ids[:, :PROMPT], cache=cache)]
    found += [model(ids[:, i : i + 1], cache=cache) for i in range(PROMPT, PROMPT + TOKENS)]
    return np.array(mx.concatenate(found, axis=1).astype(mx.float32))


def half(model: LanguageModel) -> int:
    """Bytes of half the experts, and no less than one token needs."""
    total = 0
    for block in (each for each in model.modules() if isinstance(each, MoE)):
        stored = tree_flatten(block.parameters())
        path = f"{block.experts_path}."
        size = sum(value.nbytes for name, value in stored if name.startswith(path))
        total += size * max(block.experts // 2, min(block.top_k, block.experts)) // block.experts
    return total


def forms(family: Family, config: dict[str, Any]) -> Iterator[tuple[LanguageModel, dict[str, Any]]]:
    """The tiny model with 4-bit experts, then as it is."""
    packed = build_tiny(family, config)
    entry = _quantize_experts(packed)
    yield packed, {**config, "quantization": entry}
    yield build_tiny(family, config), config


@pytest.mark.parametrize("name", CATALOG.names())
def test_half_the_experts_in_memory_are_enough(name: str, tmp_path: Path) -> None:
    family = CATALOG.load(name)
    config = tiny_config(family)
    made = forms(family, config)
    try:
        tried = [next(made)]
    except DeviceError as error:
        pytest.skip(f"needs {error.expected}")
    if family.backbone is not None and family.backbone.kept is not None:
        model, entry = tried[0]
        with pytest.raises(ConfigError, match="blocks of mlx-lm"):
            load_model(written(model, None, entry, tmp_path), family=family, expert_memory="1GB")
        return
    expected: list[np.ndarray] = []
    for layout in (None, *range(len(family.expert_layouts))):
        seen = 0
        for form in (0, 1):  # the plain one is for layouts that have no quantised one
            if form == len(tried):
                tried.append(next(made))
            model, entry = tried[form]
            if form == len(expected):
                whole, _ = load_model(written(model, None, entry, tmp_path), family=family, dtype="float32")
                expected.append(logits(whole))
            try:
                folder = written(model, layout, entry, tmp_path)
                budget = half(model)
                loaded, _ = load_model(folder, family=family, dtype="float32", expert_memory=budget)
            except TensorError:
                continue  # no checkpoint keeps these weights in this layout
            assert any(block.slots for block in loaded.modules() if isinstance(block, MoE))
            trace.reset()
            np.testing.assert_array_equal(logits(loaded), expected[form], err_msg=f"layout {layout}")
            total = trace.memory_total()
            assert total is not None
            assert total.misses
            seen += 1
            break
        assert seen, f"layout {layout} was not tried"
