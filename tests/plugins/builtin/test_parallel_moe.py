"""Layers whose two branches stand beside each other say which one they lack."""

from __future__ import annotations

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.tiny_config import tiny_config


def test_a_layer_without_its_dense_mlp_is_refused() -> None:
    family = catalog().load("gemma4_text")
    assert family.moe is not None
    bare = family.model_copy(update={"moe": family.moe.model_copy(update={"shared": None})})
    with pytest.raises(SpecError, match="has attention and a dense MLP"):
        build_tiny(bare, tiny_config(bare))


def test_parallel_branches_are_two_in_every_layer() -> None:
    family = catalog().load("cohere2_moe")
    variants = dict.fromkeys(family.variants)
    bare = family.model_copy(update={"variants": variants})
    with pytest.raises(ConfigError, match="parallel branches and lacks one"):
        build_tiny(bare, tiny_config(family))
