"""One token's experts as one launch: the CUDA text on the CPU, whose first block does every block's share."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.launch_pair import arrays_of
from mlx_experts.engine.kernels.gpu.source import text
from mlx_experts.engine.kernels.gpu.tiles import one_launch, two_launches
from mlx_experts.engine.kernels.gpu.tiles.form import tile_text
from mlx_experts.engine.kernels.gpu.tiles.one_launch import CutOne, One

CASES = {
    "one_unit_a_warp": (dict(hidden=512, width=256, experts=9, top_k=4), CutOne(8, 2, 1)),
    "several_units_a_warp": (dict(hidden=640, width=384, experts=9, top_k=8), CutOne(8, 4, 2)),
    "more_outputs_than_items": (dict(hidden=640, width=64, top_k=1), CutOne(8, 1, 1)),
    "no_gate_in_float16": (dict(activation="relu2", dtype=mx.float16, bias=True), CutOne(8, 2, 1)),
    "shared_and_weighed": (
        dict(hidden=640, width=384, shared=768, weighed=8, top_k=2),
        CutOne(10, 2, 1),
    ),
    "mxfp4": (dict(mode="mxfp4", group=32, hidden=384, width=192, bias=True), CutOne(8, 2, 1)),
    "nvfp4": (dict(mode="nvfp4", group=16, global_scale=True, hidden=352, width=96), CutOne(8, 2, 1)),
    "eight_bits": (dict(bits=8, group=32, hidden=96, width=224), CutOne(8, 2, 1)),
    "plain": (dict(mode="plain", hidden=160, width=288), CutOne(8, 1, 1)),
    "mixed": (dict(down=("affine", 6, 64)), CutOne(8, 2, 1)),
    "weighed_with_bias": (
        dict(hidden=640, width=384, shared=384, weighed=8, bias=True, top_k=2),
        CutOne(8, 2, 1),
    ),
    "joined_halves": (dict(shared=640, joined=True, weighed=16, bias=True), CutOne(8, 2, 2)),
    "groups_of_32": (dict(group=32, hidden=384, width=192), CutOne(8, 2, 1)),
    "groups_of_128": (dict(group=128, hidden=384, width=256), CutOne(10, 2, 1)),
    "thirty_two_experts": (dict(experts=33, top_k=32, width=128), CutOne(8, 2, 1)),
}


def run(built, cut, host, change=lambda text: text):
    """The distance to the truth, from words without a value and poisoned memory."""
    one = One(built.request, cut)
    launch = one_launch.build(cuda.BACKEND, built.experts, one)
    state = mx.full((one.words,), int(one_launch.NOTHING[:-1], 16), mx.uint32)
    held = arrays_of(built.experts) | {"x": built.x, "indices": built.indices, "weights": built.weights}
    inputs = [(held | {"state": state})[name] for name in launch.inputs]
    (out,) = host.run(cuda.BACKEND, launch, inputs, [(built.truth.shape, built.x.dtype)], change)
    return built.distance(mx.array(out))


@pytest.mark.parametrize(("options", "cut"), CASES.values(), ids=CASES)
def test_the_text_matches_truth_on_the_cpu(options, cut, build_case, case_type, host_cuda):
    built = build_case(case_type(**options), "cuda")
    assert run(built, cut, host_cuda) < 5e-3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # It does not wait for what others do.
        ("if (!who) return -1;", "return -1;"),
        # It does not wait for weights.
        ("me_full_wait(full, ME_PHASE)", ""),
        ("(is_own(unit) ? ME_K : unit / units), 0);", "(is_own(unit) ? ME_K : unit / units), 1);"),
        ("me_swap(low_total, 2)", "me_swap(low_total, 1)"),
        ("score, unit / units & 31", "score, 0"),
    ],
)
def test_a_planted_mistake_is_noticed(right, wrong, build_case, case_type, host_cuda):
    built = build_case(case_type(hidden=640, width=384, experts=9, top_k=8), "cuda")

    def change(text):
        assert right in text
        return text.replace(right, wrong)

    assert not run(built, CutOne(8, 2, 1), host_cuda, change) < 5e-3


def test_small_experts_are_cut_to_fill_the_device_once(build_case, case_type):
    built = build_case(case_type(hidden=2048, width=768, experts=9, top_k=8), "cuda")
    found = one_launch.plan(built.request, 132, 227 * 1024)
    assert found is not None
    assert found.cut == CutOne(24, 4, 1)
    assert (found.cut.items(built.request), found.cut.down_blocks(built.request)) == (128, 128)
    assert one_launch.plan(built.request, 132, 48 * 1024) is None
    wide = build_case(case_type(hidden=4096, width=2048, experts=3, top_k=2), "cuda")
    assert one_launch.plan(wide.request, 132, 227 * 1024) is None
    assert two_launches.takes_down(wide.request)


@pytest.mark.parametrize("options", [CASES["mxfp4"], CASES["shared_and_weighed"], CASES["one_unit_a_warp"]])
def test_a_block_that_does_not_wait_computes_what_is_missing(options, build_case, case_type, host_cuda):
    built = build_case(case_type(**options[0]), "cuda")
    impatient = "#define ME_PATIENCE 0"
    assert (
        run(built, options[1], host_cuda, lambda t: re.sub(r"#define ME_PATIENCE \d+", impatient, t)) < 5e-3
    )


def test_a_value_with_the_bits_of_nothing_is_left_as_another(host_cuda):
    source = (
        f"#define ME_NOTHING {one_launch.NOTHING}\n{text('prelude.cu')}{tile_text('one_device', 'one_leave')}"
        "namespace mlx::core::cu {__global__ void leave(\n    const float* in,\n    float* out) {\n"
        "if (threadIdx.x < 2) me_leave(out + threadIdx.x, in[threadIdx.x]);\n}}"
    )
    values = np.array([0xFFFFFFFF, 0x3F800000], np.uint32).view(np.float32)
    got = host_cuda.call(source, [values], 2, groups=1, threads=32)
    assert np.isnan(got[0])
    assert got.view(np.uint32).tolist() == [0x7FFFFFFF, 0x3F800000]


def test_scales_that_are_not_whole_vectors_are_left_to_two_launches(build_case, case_type):
    built = build_case(case_type(mode="mxfp4", group=32, width=160), "cuda")
    assert two_launches.takes_down(built.request)
    assert one_launch.plan(built.request, 132, 227 * 1024) is None


def test_what_the_text_itself_has_is_left_of_the_room(build_case, case_type):
    built = build_case(case_type(hidden=2048, width=768, experts=9, top_k=8), "cuda")
    found = one_launch.plan(built.request, 132, 227 * 1024)
    room = found.cut.room(built.request)
    smaller = one_launch.plan(built.request, 132, room)
    assert smaller is None or smaller.cut.room(built.request) < room
    assert one_launch.plan(built.request, 132, room + 16) == found
