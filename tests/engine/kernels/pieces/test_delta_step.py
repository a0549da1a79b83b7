"""One launch for a token of a gated delta net, against the rule in float64."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from planted import planted

from mlx_experts.engine.kernels.gpu.pieces import delta_step, truth
from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.kernels.gpu.pieces.row_product import backend_of
from mlx_experts.engine.kernels.request import Decline

LIMIT = {mx.bfloat16: 3e-3, mx.float16: 5e-4, mx.float32: 2e-6}


def step_of(by_key_head=True, gate="silu", dk=40, dv=24, taps=4, dtype=mx.bfloat16) -> DeltaStep:
    """Two key heads and four value heads."""
    channels = 2 * 2 * dk + 4 * dv
    return DeltaStep(
        key_heads=2,
        value_heads=4,
        key_dim=dk,
        value_dim=dv,
        kernel=taps,
        by_key_head=by_key_head,
        gate=gate,
        eps=1e-6,
        conv=mx.random.normal((channels, taps, 1)).astype(dtype),
        decay=mx.random.normal((4,)),
        shift=mx.random.normal((4,)).astype(dtype),
        norm=(1 + 0.3 * mx.random.normal((dv,))).astype(dtype),
    )


def distances(kind, step, on_host, dtype=mx.bfloat16, change=lambda t: t, join=False):
    """Distance of every output to the truth."""
    assert delta_step.check(step) is None
    piece = delta_step.build(step, backend_of(kind), kind, dtype, join=join)
    values = step.value_heads * step.value_dim
    widths = [step.channels + values, 2 * step.value_heads]
    if not step.by_key_head:
        widths = [step.channels, values, step.value_heads, step.value_heads]
    token = {f"r{i}": mx.random.normal((1, 1, width)).astype(dtype) for i, width in enumerate(widths)}
    token["past"] = mx.random.normal((1, step.kernel - 1, step.channels)).astype(dtype)
    token["memory"] = mx.random.normal((1, step.value_heads, step.value_dim, step.key_dim))
    got, want = on_host(kind, piece, token, change), truth.delta_step(step, token)
    assert set(got) == set(want)
    return {name: truth.distance(got[name], want[name]) for name in want}


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize("by_key_head", [True, False])
@pytest.mark.parametrize("dtype", LIMIT)
def test_text_matches_truth_on_the_cpu(kind, by_key_head, dtype, on_host):
    mx.random.seed(1)
    step = step_of(by_key_head, "silu" if by_key_head else "sigmoid", dtype=dtype)
    for name, far in distances(kind, step, on_host, dtype, join=by_key_head).items():
        assert far < (2e-6 if name == "new_memory" else LIMIT[dtype]), name


@pytest.mark.parametrize(("dk", "dv", "taps"), [(128, 128, 4), (8, 8, 2), (256, 72, 3)])
def test_other_widths_match_truth_on_the_cpu(dk, dv, taps, on_host):
    mx.random.seed(2)
    for name, far in distances("cuda", step_of(dk=dk, dv=dv, taps=taps), on_host).items():
        assert far < (2e-6 if name == "new_memory" else LIMIT[mx.bfloat16]), name


MISTAKES = {
    "the memory does not decay": ("kept[r][i] *= stay;", ";"),
    "the memory is not corrected": ("- me_sum(seen)", "- 0.0f * me_sum(seen)"),
    "the past is not moved on": ("new_past + (t - 1) *", "new_past + t *"),
    "every value head reads the first key head": ("key = group / ME_RATIO", "key = group / ME_RATIO * 0"),
    "a key has any length": ("k[i] *= k_by;", ";"),
}


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_noticed(right, wrong, on_host):
    mx.random.seed(1)
    far = distances("cuda", step_of(), on_host, change=planted(right, wrong))
    assert any(not each < 10 * LIMIT[mx.bfloat16] for each in far.values())


def test_widths_without_a_kernel_are_declined():
    step = step_of()
    for verdict in (
        delta_step.check(replace(step, key_dim=264)),
        delta_step.check(replace(step, value_dim=20)),
        delta_step.check(replace(step, kernel=1)),
    ):
        assert isinstance(verdict, Decline)
