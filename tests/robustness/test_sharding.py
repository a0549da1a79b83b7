"""Cut between whole quantisation groups, or not at all; both ranks together are the whole."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import quantize_model

from mlx_experts.engine.layers.tensor_parallel import spread_columns, spread_experts, spread_rows
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError

FORMATS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)]
FORMATS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


class Rank:
    """What the divisions ask of one rank of a group."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def values(module: nn.Module) -> mx.array:
    return mx.dequantize(
        module["weight"],
        module["scales"],
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


@pytest.mark.report("DST-01")
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_packed_layers_of_any_width_are_cut_into_their_values(
    mode: str, bits: int, group: int, axis: int
) -> None:
    whole = nn.Linear(384, 256, bias=False).to_quantized(group, bits, mode=mode)
    parts = []
    for rank in range(2):
        parent = nn.Module()
        parent.proj = whole
        (spread_columns if axis else spread_rows)(parent, "proj", Rank(rank))
        parts.append(values(parent.proj))
    assert all(part.shape == ((256, 192) if axis else (128, 384)) for part in parts)
    assert mx.array_equal(mx.concatenate(parts, axis=axis), values(whole)).item()


@pytest.mark.report("DST-05")
@pytest.mark.parametrize(("inner", "group", "ranks"), [(96, 32, 2), (64, 64, 2), (64, 32, 3)])
def test_experts_whose_groups_the_ranks_cannot_share_are_refused_untouched(
    inner: int, group: int, ranks: int
) -> None:
    container = SwitchGLU(64, inner, 4)
    nn.quantize(container, group, 4)
    before = {leaf: container[leaf].weight.shape for leaf in ("gate_proj", "up_proj", "down_proj")}
    with pytest.raises(SettingError, match="cannot be spread over the ranks"):
        spread_experts(container, Rank(0, ranks), "experts")
    assert {leaf: container[leaf].weight.shape for leaf in before} == before


@pytest.mark.report("DST-05")
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_experts_are_cut_between_whole_groups(mode: str, bits: int, group: int) -> None:
    container = SwitchGLU(64, 128, 4)
    nn.quantize(container, group, bits, mode=mode)
    want = {leaf: values(container[leaf]) for leaf in ("gate_proj", "up_proj", "down_proj")}
    planes = {leaf: dict(container[leaf]) for leaf in want}
    parts: dict[str, list[mx.array]] = {leaf: [] for leaf in want}
    for rank in range(2):
        for leaf, held in planes.items():
            container[leaf].update(held)
        spread_experts(container, Rank(rank), "experts")
        for leaf in want:
            parts[leaf].append(values(container[leaf]))
    for leaf, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        assert mx.array_equal(mx.concatenate(parts[leaf], axis=axis), want[leaf]).item()


@pytest.mark.report("C19")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "granitemoehybrid"])
@pytest.mark.parametrize("ranks", [3, 5])
def test_a_model_that_ranks_cannot_share_is_as_it_was(name: str, ranks: int, lab: Any) -> None:
    model = build_tiny(catalog().load(name), lab.tiny(name)[1])
    before = lab.parameters(model)
    want = lab.logits(model)
    with pytest.raises(SettingError):
        model.shard(Rank(0, ranks))
    after = lab.parameters(model)
    assert after.keys() == before.keys()
    assert all(after[n] is before[n] or mx.array_equal(after[n], before[n]).item() for n in before)
    assert lab.distance(lab.logits(model), want) == 0


@pytest.mark.report("C18")
@pytest.mark.parametrize(("width", "group"), [(128, 64), (96, 32), (80, None)])
def test_a_router_is_quantised_in_groups_that_divide_its_width_or_stays_float(
    width: int, group: int | None, lab: Any
) -> None:
    config = lab.resized("qwen3_moe", hidden_size=width)
    model = build_tiny(catalog().load("qwen3_moe"), config)
    quantised, settings = quantize_model(model, {}, 16, 4, "nvfp4")
    router = dict(quantised.named_modules())["model.layers.1.mlp.gate"]
    assert ("scales" in router) == (group is not None)
    if group is not None:
        assert settings["quantization"]["model.layers.1.mlp.gate"] == {"group_size": group, "bits": 8}
        assert np.isfinite(lab.logits(quantised)).all()
