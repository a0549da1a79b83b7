"""Parameters that a rope type cannot do without."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_experts.engine.layers.rope import Rope
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.spec.rope_plan import RopePlan


def yarn(**params: Any) -> Rope:
    return Rope(RopePlan("half", 10000.0, "yarn", 1.0, None, params, 64), 16)


def test_yarn_without_a_factor_takes_it_from_both_lengths_or_is_refused() -> None:
    x = mx.random.normal((1, 2, 3, 16))
    stated = yarn(factor=4.0, original_max_position_embeddings=16)
    assert mx.array_equal(yarn(original_max_position_embeddings=16)(x), stated(x))
    with pytest.raises(ConfigError, match="'factor'"):
        yarn()


@pytest.mark.parametrize("params", [{"alpha": 4.0}, {"factor": 4.0}])
def test_a_base_is_stretched_only_where_more_than_one_pair_turns(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="above 2"):
        Rope(RopePlan("half", 10000.0, "dynamic", 1.0, None, params, 64), 2)
    assert Rope(RopePlan("half", 10000.0, "dynamic", 1.0, None, params, 64), 4)(mx.ones((1, 1, 2, 4))).size
