"""Experts of many tokens: the text run on the CPU against truth, and what it takes."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.grouped import experts as grouped

CASES = {
    "affine_4_bits": dict(rows=11),
    "an_expert_of_more_than_a_tile": dict(rows=90, experts=3, top_k=2, hidden=128, width=64),
    "affine_8_bits_with_bias": dict(rows=5, bits=8, group=32, bias=True),
    "affine_6_bits_of_short_steps": dict(rows=5, bits=6, group=32, hidden=96, width=160),
    "mxfp4_of_short_steps": dict(rows=7, mode="mxfp4", group=32, hidden=160, width=96, bias=True),
    "mxfp8_without_gate": dict(rows=7, mode="mxfp8", bits=8, group=32, activation="relu2"),
    "nvfp4": dict(rows=7, mode="nvfp4", group=16, global_scale=True, width=96),
    "affine_then_nvfp4": dict(rows=3, bits=3, down=("nvfp4", 4, 16)),
    "plain": dict(rows=7, mode="plain", experts=12),
}


def run(built, host, change=lambda text: text):
    """The launches on the CPU, one after another."""
    path = grouped.GroupedExperts(cuda.BACKEND, built.experts, built.request)
    tokens = built.x.shape[0]
    flat = built.indices.reshape(-1)
    order = mx.argsort(flat).astype(mx.uint32)
    plan = path.plan(tokens)

    def launch(number, given):
        made, times, shapes, dtypes = plan[number]
        arrays = [*given, *path.held()[number].values()]
        return host.run(cuda.BACKEND, made, arrays, list(zip(shapes, dtypes, strict=True)), change, times)

    rows, starts, places = launch(0, [built.x, order, flat[order]])
    as_bfloat = mx.array(rows).astype(mx.bfloat16)
    starts = mx.array(np.asarray(starts).view(np.int32))
    (act,) = launch(1, [as_bfloat, starts])
    (outputs,) = launch(2, [mx.array(act).astype(mx.bfloat16), starts])
    return launch(3, [mx.array(outputs), mx.array(places), built.weights])[0]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_text_matches_truth_on_the_cpu(options, build_case, case_type, host_cuda):
    built = build_case(case_type(**options), "cuda")
    assert grouped.takes(built.request)
    # Weights and activations are rounded to bfloat16, as decoded weights are.
    assert built.distance(run(built, host_cuda)) < 7e-3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("experts[middle] < e", "experts[middle] <= e"),
        ("i < 4 ? i * 2 : i * 2 - 7", "i"),
        ("128.0f * me_value", "127.0f * me_value"),
        ("n * 8 < count", "n * 8 + 8 < count"),
        ("by * v[i]", "v[i]"),
    ],
)
def test_a_planted_mistake_in_the_text_is_noticed(right, wrong, build_case, case_type, host_cuda):
    built = build_case(case_type(rows=70, experts=3, top_k=2, hidden=128, width=64), "cuda")
    used = []

    def planted(text):
        used.append(right in text)
        return text.replace(right, wrong)

    assert not built.distance(run(built, host_cuda, planted)) < 2e-2
    assert any(used)


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype="float16"),
        dict(dtype="float32"),
        dict(num_experts=grouped.MAX_EXPERTS + 1),
    ],
)
def test_what_is_not_taken(change, build_case, case_type):
    request = build_case(case_type(rows=5), "cuda").request
    assert grouped.takes(request)
    assert not grouped.takes(dataclasses.replace(request, **change))
