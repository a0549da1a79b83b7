"""The layer with two halves and its experts on a shortcut."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.plugins.builtin.shortcut import ShortcutLayer
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family


def layer_of(family: Family) -> Any:
    plan = resolve(family, tiny_config(family))
    layer = ShortcutLayer(plan.layers[0], plan, None)
    mx.random.seed(4)
    drawn = [(k, v + 0.2 * mx.random.normal(v.shape)) for k, v in tree_flatten(layer.parameters())]
    layer.update(tree_unflatten(drawn))
    return layer


def test_experts_read_the_first_half_and_are_added_at_the_end() -> None:
    layer = layer_of(catalog().load("longcat_flash"))
    x = mx.random.normal((2, 5, 64), key=mx.random.key(1))
    state = ForwardState(mx.zeros((2, 5), dtype=mx.int32))
    first = x + layer.self_attn[0](layer.input_layernorm[0](x), state)
    normed = layer.post_attention_layernorm[0](first)
    first = first + layer.mlps[0](normed)
    second = first + layer.self_attn[1](layer.input_layernorm[1](first), state)
    second = second + layer.mlps[1](layer.post_attention_layernorm[1](second))
    want = second + layer.mlp(normed)
    assert mx.abs(layer(x, state) - want).max().item() < 1e-5 * mx.abs(want).max().item()


def test_each_half_has_its_own_cache() -> None:
    layer = layer_of(catalog().load("longcat_flash"))
    x = mx.random.normal((1, 6, 64), key=mx.random.key(1))
    state = ForwardState(mx.zeros((1, 6), dtype=mx.int32))
    cache = layer.make_cache()
    parts = [layer(x[:, i : i + 2], ForwardState(mx.zeros((1, 2), dtype=mx.int32)), cache) for i in (0, 2, 4)]
    assert [half.offset for half in cache.caches] == [6, 6]
    whole = layer(x, state)
    assert mx.abs(mx.concatenate(parts, axis=1) - whole).max().item() < 1e-5 * mx.abs(whole).max().item()


def test_a_block_without_a_norm_is_refused() -> None:
    family = catalog().load("longcat_flash")
    bare = family.model_copy(update={"block": family.block.model_copy(update={"pre_mlp": None})})
    with pytest.raises(SpecError, match="a norm before each"):
        layer_of(bare)
