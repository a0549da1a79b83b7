"""A block of experts in `mx.compile`: for each shape it is right; without shapes MLX itself cannot."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest


@pytest.mark.report("N5")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_compiled_block_is_right_for_every_shape_and_mlx_says_why_not_without(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    block = model.layers[-1].mlp
    width = model.plan.sizes.hidden_size
    compiled = mx.compile(lambda x: block(x))
    for rows in (1, 2, 5):
        x = mx.random.normal((1, rows, width))
        assert mx.allclose(compiled(x), block(x), rtol=1e-5, atol=1e-5).item()
    x = mx.random.normal((1, 2, width))
    # A slice of fixed bounds is enough, and no block that picks experts is without one. Once MLX infers its
    # shape, the block is to be tried again.
    with pytest.raises(ValueError, match="Slice cannot infer output shapes"):
        mx.compile(lambda x: x[..., :4], shapeless=True)(x)
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        mx.compile(lambda x: block(x), shapeless=True)(x)
