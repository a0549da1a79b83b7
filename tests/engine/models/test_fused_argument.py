"""``fused`` reaches every part of a model that has kernels to choose."""

from __future__ import annotations

import copy

import pytest

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models import factory
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import ModelArgs
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mixer_and_block_hears_that_kernels_are_not_wanted(name: str) -> None:
    family = catalog().load(name)
    config = copy.deepcopy(tiny_config(family))
    model = factory.build(ModelArgs(resolve(family, config), config, False, family.family))
    parts = [module for module in model.modules() if isinstance(module, Mixer | MoE)]
    assert parts
    assert [type(part).__name__ for part in parts if part.fused is not False] == []
