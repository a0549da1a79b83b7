"""The CPU's attention of many rows against attention in float64, and when mlx-lm's function runs instead."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.dispatch import attention_dispatch
from mlx_experts.engine.dispatch.attention_dispatch import attention
from mlx_experts.engine.kernels.cpu import stacks

CLOSE = {mx.float32: 1e-6, mx.bfloat16: 5e-3, mx.float16: 5e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so that one that is not written is seen."""
    monkeypatch.setattr(stacks, "fresh", lambda shape: np.full(shape, np.nan, np.float32))


def arrays(batch, heads, groups, length, seen, width, depth, dtype=mx.float32):
    rng = np.random.default_rng(3)
    shapes = [(batch, heads, length, width), (batch, groups, seen, width), (batch, groups, seen, depth)]
    return [mx.array(rng.standard_normal(s, dtype=np.float32)).astype(dtype) for s in shapes]


def truth(q, k, v, scale, visible, sinks=None):
    """Softmax attention in float64; ``visible`` [B or 1, L, S]."""
    q, k, v = (np.array(t.astype(mx.float32)).astype(np.float64) for t in (q, k, v))
    share = q.shape[1] // k.shape[1]
    k, v = (np.repeat(t, share, 1) for t in (k, v))
    logits = np.where(visible[:, None], scale * q @ k.swapaxes(-1, -2), -np.inf)
    extra = np.zeros((1, q.shape[1], 1, 0)) if sinks is None else sinks.reshape(1, -1, 1, 1)
    extra = np.broadcast_to(extra, (*logits.shape[:-1], extra.shape[-1]))
    shares = np.exp(np.concatenate([logits, extra], -1))
    shares = shares[..., : logits.shape[-1]] / shares.sum(-1, keepdims=True)
    return shares @ v


def error(got, wanted):
    return np.linalg.norm(np.array(got.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)


def causal(length, seen):
    return (np.arange(seen) <= np.arange(length)[:, None] + seen - length)[None]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 4, 2, 33, 33, 128, 128),
        (2, 4, 1, 5, 40, 80, 48),
        (1, 2, 2, 2, 1100, 20, 30),
        (3, 2, 1, 1, 7, 16, 16),
    ],
    ids=str,
)
def test_causal_attention_matches_the_truth(sizes, dtype):
    q, k, v = arrays(*sizes, dtype)
    got = attention(True)(q, k, v, cache=None, scale=0.2, mask="causal")
    assert got.dtype == dtype
    assert error(got, truth(q, k, v, 0.2, causal(*sizes[3:5]))) <= CLOSE[dtype]


def test_masks_and_sinks_match_the_truth():
    q, k, v = arrays(3, 4, 2, 9, 21, 32, 16)
    visible = np.random.default_rng(0).random((3, 9, 21)) > 0.4
    visible[..., 0] = True
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    attend = attention(True)
    for shown in (visible, visible[:1]):
        got = attend(q, k, v, cache=None, scale=0.2, mask=mx.array(shown[:, None]), sinks=mx.array(sinks))
        assert error(got, truth(q, k, v, 0.2, shown, sinks)) <= 1e-6
    got = attend(q, k, v, cache=None, scale=0.2, mask=mx.array(visible[0]))
    assert error(got, truth(q, k, v, 0.2, visible[:1])) <= 1e-6
    assert error(attend(q, k, v, cache=None, scale=0.2, mask=None), truth(q, k, v, 0.2, visible)) > 1e-2


def test_a_query_that_sees_nothing_gets_what_mlx_gives_it():
    q, k, v = arrays(2, 2, 1, 3, 6, 16, 16)
    shown = np.ones((2, 1, 3, 6), bool)
    shown[1, :, 0] = False
    attend, asked = attention(True), {"cache": None, "scale": 0.3, "mask": mx.array(shown)}
    got, wanted = attend(q, k, v, **asked), attention(False)(q, k, v, **asked)
    assert mx.allclose(got, wanted, atol=1e-5)


def test_repeated_runs_are_bitwise_equal():
    q, k, v = arrays(1, 8, 2, 70, 70, 64, 64)
    runs = [np.array(attention(True)(q, k, v, cache=None, scale=0.1, mask="causal")) for _ in range(3)]
    assert all(np.array_equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("fused", [True, False])
def test_the_switch_chooses_who_computes(fused, monkeypatch):
    calls = []
    monkeypatch.setattr(attention_dispatch, "_on_cpu", lambda *given: calls.append(given))
    q, k, v = arrays(1, 2, 1, 4, 4, 16, 16)
    attention(fused)(q, k, v, cache=None, scale=0.1, mask="causal")
    assert len(calls) == fused


def test_other_masks_gradients_and_single_rows_are_mlxs():
    q, k, v = arrays(2, 2, 1, 4, 6, 16, 16)
    additive = mx.zeros((1, 1, 4, 6))
    by_head = mx.ones((1, 2, 4, 6), mx.bool_)
    for mask in (additive, by_head):
        assert attention_dispatch._on_cpu(q, k, v, 0.1, mask, None) is None
    attend = attention(True)

    def loss(t):
        return attend(t, k, v, cache=None, scale=0.1, mask="causal").sum()

    gradient = mx.grad(loss)(q)
    wanted = mx.grad(lambda t: attention(False)(t, k, v, cache=None, scale=0.1, mask="causal").sum())(q)
    assert mx.allclose(gradient, wanted, atol=1e-5)
