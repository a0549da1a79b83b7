"""The config that is made of a family file alone."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.tiny_config import tiny_config


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ([{"width": 64}], "block_configs.0{layer}.width"),
        (3, "block_configs.first.width"),
        ({"first": "text"}, "block_configs.first.width"),
    ],
)
def test_an_example_without_a_place_for_a_key_is_refused_by_name(stated: Any, key: str) -> None:
    family = catalog().load("qwen3_moe")
    width = family.config.expert_width.model_copy(update={"keys": (key,)})
    config = family.config.model_copy(update={"expert_width": width})
    broken = family.model_copy(update={"example": {"block_configs": stated}, "config": config})
    with pytest.raises(SpecError, match="no place for the key block_configs"):
        tiny_config(broken)
