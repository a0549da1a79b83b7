"""A router that reads the forward state stands in a block that hands it on."""

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.tiny_config import tiny_config


@pytest.mark.parametrize("name", ["deepseek_v4", "zaya", "inkling"])
def test_the_standard_block_refuses_a_router_that_reads_the_state(name: str) -> None:
    family = catalog().load(name)
    config = tiny_config(family)
    build_tiny(family, config)
    other = catalog().load("qwen3_moe").block
    plain = family.model_copy(update={"block": other})
    with pytest.raises(ConfigError, match="does not tell its router"):
        build_tiny(plain, config)
