"""SparseMixer against its definition, one token and one pick at a time."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_experts.plugins.builtin.sparsemixer import sparsemixer
from mlx_experts.registry.errors import ConfigError, SpecError

JITTER = 0.2


def pick(logits: list[float], left: list[int]) -> tuple[int, float]:
    """The best of the experts that are left, and its share among those that come close to it."""
    best = max(left, key=lambda e: logits[e])
    top = logits[best]
    close = [e for e in left if (top - logits[e]) / max(abs(logits[e]), top) <= 2 * JITTER]
    return best, 1.0 / sum(math.exp(logits[e] - top) for e in close)


def test_two_picks_each_with_a_softmax_of_its_own() -> None:
    logits = mx.random.normal((3, 5, 8), key=mx.random.key(1))
    indices, weights = sparsemixer(logits=logits, top_k=2, options={"jitter": JITTER})
    for row, found, shares in zip(
        logits.reshape(-1, 8).tolist(),
        indices.reshape(-1, 2).tolist(),
        weights.reshape(-1, 2).tolist(),
        strict=True,
    ):
        first, first_share = pick(row, list(range(8)))
        second, second_share = pick(row, [e for e in range(8) if e != first])
        assert found == [first, second]
        assert shares == pytest.approx([first_share, second_share], rel=1e-5)


def test_another_number_of_picks_is_refused() -> None:
    with pytest.raises(ConfigError, match="two experts"):
        sparsemixer(logits=mx.zeros((1, 8)), top_k=3, options={"jitter": JITTER})


def test_unknown_option_is_refused() -> None:
    with pytest.raises(SpecError, match="sparsemixer"):
        sparsemixer(logits=mx.zeros((1, 8)), top_k=2, options={"jitters": JITTER})
