"""Convolutions over a sequence that arrives in pieces."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_experts.engine.layers.conv import causal_conv, make_causal_conv


@pytest.fixture
def conv() -> object:
    mx.random.seed(1)
    module = make_causal_conv(6, 4, bias=True)
    module.bias = mx.random.normal((6,))
    return module


def test_convolution_is_the_weighted_sum_of_the_last_inputs(conv: object) -> None:
    x = mx.random.normal((2, 5, 6))
    padded = mx.concatenate([mx.zeros((2, 3, 6)), x], axis=1)
    want = sum(padded[:, i : i + 5] * conv.weight[:, i, 0] for i in range(4)) + conv.bias
    assert mx.allclose(causal_conv(conv, x, None, None), want, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_pieces_give_what_the_whole_gives(conv: object, cut: int) -> None:
    x = mx.random.normal((2, 8, 6))
    cache = ArraysCache(1)
    pieces = [causal_conv(conv, part, None, cache) for part in (x[:, :cut], x[:, cut:])]
    assert mx.allclose(mx.concatenate(pieces, axis=1), causal_conv(conv, x, None, None), atol=1e-6)
    assert mx.array_equal(cache[0], x[:, -3:])


def test_rows_padded_on_the_right_remember_their_own_last_inputs(conv: object) -> None:
    x = mx.random.normal((2, 6, 6))
    cache = ArraysCache(1)
    cache.prepare(lengths=[6, 2])
    causal_conv(conv, x, cache.make_mask(6), cache)
    assert mx.array_equal(cache[0][0], x[0, 3:])
    assert mx.array_equal(cache[0][1], mx.concatenate([mx.zeros((1, 6)), x[1, :2]]))


def test_rows_padded_on_the_left_see_zeros_before_they_begin(conv: object) -> None:
    x = mx.random.normal((1, 6, 6))
    cache = ArraysCache(1, left_padding=[2])
    got = causal_conv(conv, x, cache.make_mask(6), cache)
    assert mx.allclose(got[:, 2:], causal_conv(conv, x[:, 2:], None, None), atol=1e-6)
