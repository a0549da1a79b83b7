"""Lightning attention's recurrence, against its definition token by token."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_experts.plugins.builtin import lightning
from mlx_experts.plugins.builtin.lightning import decayed_attention, head_rates

RATES = mx.array([0.5, 0.06])


def by_token(q: mx.array, k: mx.array, v: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    outputs = []
    for t in range(q.shape[2]):
        state = mx.exp(-RATES)[:, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None, :] @ state)[:, :, 0])
    return mx.stack(outputs, axis=2), state


def drawn(rows: int, length: int) -> tuple[mx.array, ...]:
    mx.random.seed(2)
    return tuple(mx.random.normal((rows, 2, length, 4)) for _ in range(3))


@pytest.mark.parametrize("length", [1, 3, 5, 8, 11])
def test_blocks_give_what_the_recurrence_gives(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "BLOCK", 4)
    q, k, v = drawn(2, length)
    state = mx.random.normal((2, 2, 4, 4))
    got, last = decayed_attention(q, k, v, RATES, state, None)
    want, end = by_token(q, k, v, state)
    assert mx.allclose(got, want, atol=1e-4)
    assert mx.allclose(last, end, atol=1e-4)


@pytest.mark.parametrize("left", [True, False])
def test_padding_neither_adds_nor_decays(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "BLOCK", 4)
    q, k, v = drawn(1, 9)
    real = slice(2, 9) if left else slice(0, 7)
    mask = mx.zeros((1, 9), dtype=mx.bool_)
    mask[:, real] = True
    state = mx.random.normal((1, 2, 4, 4))
    got, last = decayed_attention(q, k, v, RATES, state, mask)
    want, end = by_token(q[:, :, real], k[:, :, real], v[:, :, real], state)
    assert mx.allclose(got[:, :, real], want, atol=1e-4)
    assert mx.allclose(last, end, atol=1e-4)


def test_rates_of_a_power_of_two_are_the_same_by_either_rule() -> None:
    assert head_rates(8, alibi=True) == head_rates(8, alibi=False)
    assert head_rates(8, alibi=False)[-1] == 2.0**-8


def test_alibi_fills_up_with_every_second_rate_of_the_next_power() -> None:
    assert head_rates(6, alibi=True) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert head_rates(6, alibi=False)[1] == pytest.approx(2.0 ** (-8 / 3))
