"""Mamba's scan in chunks, against its definition token by token."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import load_model
from mlx_experts.engine.layers.mixers import mamba1
from mlx_experts.engine.layers.mixers.mamba1 import selective_scan

HUB = Path(__file__).parents[3] / "cases" / "jamba" / "switches" / "hub"


def by_token(
    dt: mx.array, u: mx.array, b: mx.array, c: mx.array, a: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    outputs = []
    for t in range(dt.shape[1]):
        memory = mx.exp(dt[:, t, :, None] * a) * memory + u[:, t, :, None] * b[:, t, None, :]
        outputs.append((memory * c[:, t, None, :]).sum(axis=-1))
    return mx.stack(outputs, axis=1), memory


def drawn(tokens: int, rows: int = 2, channels: int = 6, states: int = 3) -> tuple[mx.array, ...]:
    mx.random.seed(4)
    dt, u = mx.random.uniform(0, 0.7, (rows, tokens, channels)), mx.random.normal((rows, tokens, channels))
    b, c = (mx.random.normal((rows, tokens, states)) for _ in range(2))
    a = -mx.random.uniform(0.01, 16, (channels, states))
    return dt, u, b, c, a, mx.random.normal((rows, channels, states))


def agree(got: tuple[mx.array, mx.array], want: tuple[mx.array, mx.array]) -> bool:
    return all(mx.allclose(x, y, rtol=1e-5, atol=1e-5).item() for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 1000])
def test_chunks_give_what_the_recurrence_gives(tokens: int) -> None:
    assert agree(selective_scan(*drawn(tokens)), by_token(*drawn(tokens)))


def test_prompts_are_scanned_in_parts_where_their_decays_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = drawn(100)
    monkeypatch.setattr(mamba1, "MOST_DECAYS", 40 * parts[-1].size)
    assert agree(selective_scan(*parts), by_token(*parts))
    monkeypatch.setattr(mamba1, "MOST_DECAYS", 1)
    assert agree(selective_scan(*parts), by_token(*parts))


def test_chunks_take_far_fewer_steps_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], mamba1._step
    for name in ("_step", "_fused_step"):
        monkeypatch.setattr(mamba1, name, lambda *args: steps.append(1) or step(*args))
    selective_scan(*drawn(1000))
    assert len(steps) < 60


def test_no_time_leaves_the_state_alone() -> None:
    dt, u, b, c, a, memory = drawn(40)
    _, last = selective_scan(mx.zeros_like(dt), mx.zeros_like(u), b, c, a, memory)
    assert mx.array_equal(last, memory)


def test_a_long_prompt_at_once_gives_what_its_tokens_one_by_one_give() -> None:
    model, _ = load_model(HUB, dtype="float32")
    mx.random.seed(5)
    ids = mx.random.randint(3, 120, (1, 1000))
    whole, one = make_prompt_cache(model), make_prompt_cache(model)
    want = model(ids, cache=whole)[:, -1]
    for t in range(1000):
        got = model(ids[:, t : t + 1], cache=one)[:, -1]
        mx.eval(got, [cache.state for cache in one])
    assert mx.abs(got - want).max() < 1e-4 * mx.abs(want).max()
    scanned = [(w[1], o[1]) for w, o in zip(whole[:2], one[:2], strict=True)]
    assert all(mx.allclose(w, o, rtol=1e-3, atol=1e-3) for w, o in scanned)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_state_stays_float32(kind: str) -> None:
    model, _ = load_model(HUB, dtype=kind)
    cache = make_prompt_cache(model)
    for length in (20, 1):
        logits = model(mx.ones((1, length), mx.int32), cache=cache)
        assert str(logits.dtype).endswith(kind)
        assert mx.isfinite(logits).all()
        assert cache[0][1].dtype == mx.float32
