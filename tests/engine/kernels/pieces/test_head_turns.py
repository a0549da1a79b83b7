"""The launch for norms over all heads, and for rows that other launches left."""

from __future__ import annotations

import mlx.core as mx
import pytest
from planted import planted

from mlx_experts.engine.kernels.gpu.pieces import head_turns, truth
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Norm, Turn, backend_of
from mlx_experts.engine.kernels.request import Decline

LIMIT = 3e-3


def rows_of(d: int, dims: int, whole: bool) -> dict[str, tuple[Heads, int]]:
    """Queries, keys and values."""
    turn = Turn(1.0 / 1e6 ** (mx.arange(0, dims, 2) / dims), dims, factor=0.9)

    def heads(count: int) -> tuple[Heads, int]:
        weight = (1 + 0.3 * mx.random.normal((count * d if whole else d,))).astype(mx.bfloat16)
        return Heads(d, Norm(weight, 1e-6), turn, whole=whole), count * d

    return {"q": heads(4), "k": heads(2), "v": (Heads(d, Norm(None, 1e-6)), 2 * d)}


def distances(kind, rows, on_host, change=lambda t: t):
    """Distance of every row to the truth."""
    assert head_turns.check(rows) is None
    piece = head_turns.build(rows, backend_of(kind), kind, mx.bfloat16)
    token = {n: mx.random.normal((1, 1, width)).astype(mx.bfloat16) for n, (_, width) in rows.items()}
    token["offset"] = mx.array([999] * 4, dtype=mx.int32)
    got = on_host(kind, piece, token, change)
    far = {}
    for name, (heads, _) in rows.items():
        inverse = None if heads.turn is None else truth.wide(heads.turn.inverse)
        want = truth.each_head(truth.wide(token[name]).reshape(-1), heads, 999, inverse)
        far[name] = truth.distance(got[f"out_{name}"], want)
    return far


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize(("d", "dims", "whole"), [(64, 64, True), (72, 32, False)])
def test_text_matches_truth_on_the_cpu(d, dims, whole, kind, on_host):
    mx.random.seed(1)
    for name, far in distances(kind, rows_of(d, dims, whole), on_host).items():
        assert far < LIMIT, name


def latents(c: int, r: int) -> dict[str, tuple[Heads, int]]:
    """A latent that is normalised and a key, of another width, that is rotated."""
    weight = (1 + 0.3 * mx.random.normal((c,))).astype(mx.bfloat16)
    turn = Turn(1.0 / 1e4 ** (mx.arange(0, r, 2) / r), r, interleaved=True)
    return {"l": (Heads(c, Norm(weight, 1e-6)), c), "kr": (Heads(r, turn=turn), r)}


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize(("c", "r"), [(512, 64), (40, 72)])
def test_rows_of_two_widths_take_one_launch(c, r, kind, on_host):
    mx.random.seed(1)
    for name, far in distances(kind, latents(c, r), on_host).items():
        assert far < LIMIT, name


# Which rows show a mistake, the one of them that does, what is right and what is wrong.
MISTAKES = {
    "the parts of a sum are not added": (lambda: rows_of(64, 64, True), "q", "all += red[i]", "all = red[i]"),
    "a narrower row is told the other one's width": (
        lambda: latents(40, 72),
        "kr",
        "me_turn<72, 0, 72,",
        "me_turn<40, 0, 40,",
    ),
}


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize(("rows", "shown", "right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_noticed(rows, shown, right, wrong, kind, on_host):
    mx.random.seed(1)
    assert not distances(kind, rows(), on_host, planted(right, wrong))[shown] < LIMIT


def test_heads_of_an_odd_width_are_declined():
    verdict = head_turns.check({"q": (Heads(64), 128), "k": (Heads(36), 72)})
    assert isinstance(verdict, Decline)
    assert verdict.rule == "head_width"
