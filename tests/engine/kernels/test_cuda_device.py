"""The parity set on an NVIDIA GPU: ``pytest -m cuda``."""

from __future__ import annotations

import dataclasses
import re

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_experts.engine.kernels import activations, gather
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.grouped import experts as grouped
from mlx_experts.engine.kernels.gpu.launch_pair import FusedPair, arrays_of
from mlx_experts.engine.kernels.gpu.tiles import one_launch
from mlx_experts.engine.kernels.gpu.tiles.cuts import CutDown, CutUp

pytestmark = pytest.mark.cuda

LIMITS = {mx.bfloat16: 5e-3, mx.float16: 5e-3, mx.float32: 1e-5}
DTYPES = list(LIMITS)
FORMATS = [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("plain", 16, 0),
]
CONSTANTS = {
    "swiglu_oai": dict(alpha=1.702, limit=7.0),
    "swiglu_clamp_before": dict(limit=0.5),
    "swiglu_clamp_after": dict(limit=0.2),
    "situ": dict(alpha=1.5, limit=0.5),
}
SIZES = [(32, 32), (96, 160), (128, 128), (640, 384), (1408, 704), (2048, 768), (2880, 2880), (4096, 1536)]
MIXED = [
    dict(down=("affine", 6, 64)),
    dict(down=("affine", 8, 32)),
    dict(bits=8, down=("affine", 4, 128)),
    dict(bits=5, down=("affine", 8, 64)),
    dict(down=("plain", 16, 0)),
    dict(mode="nvfp4", group=16, global_scale=True),
]


def check(built, tensor_cores: bool = True, distance: float | None = None) -> None:
    """Close to truth, every element written, and the same bits twice."""
    run = cuda.prepare(built.experts, built.x.dtype, tensor_cores=tensor_cores)
    assert isinstance(run, FusedPair)
    run.options["init_value"] = float("nan")
    first = run(built.x, built.indices, built.weights)
    again = run(built.x, built.indices, built.weights)
    assert built.distance(first) < (distance or LIMITS[built.x.dtype])
    assert np.array_equal(np.array(first.astype(mx.float32)), np.array(again.astype(mx.float32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_formats(stored, dtype, build_case, case_type):
    mode, bits, group = stored
    check(build_case(case_type(mode=mode, bits=bits, group=group, dtype=dtype, width=256, top_k=4), "cuda"))


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_formats_a_warp_a_row(stored, build_case, case_type):
    mode, bits, group = stored
    check(build_case(case_type(mode=mode, bits=bits, group=group, bias=True), "cuda"), tensor_cores=False)


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize(
    "stored", [("affine", 4, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("plain", 16, 0)], ids=str
)
def test_several_tokens(stored, rows, build_case, case_type):
    mode, bits, group = stored
    case = case_type(mode=mode, bits=bits, group=group, rows=rows, hidden=352, width=160, top_k=4, bias=True)
    check(build_case(case, "cuda"))
    check(build_case(case, "cuda"), tensor_cores=False)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_many_tokens(stored, build_case, case_type):
    mode, bits, group = stored
    width, hidden = (160, 352) if group in (0, 16, 32) else (128, 384)
    case = case_type(mode=mode, bits=bits, group=group, rows=150, hidden=hidden, width=width, bias=True)
    built = build_case(case, "cuda")
    run = grouped.prepare(built.experts, built.request)
    assert isinstance(run, grouped.GroupedExperts)
    run.options["init_value"] = float("nan")
    first, again = (run(built.x, built.indices, built.weights) for _ in range(2))
    # Weights and activations are rounded to bfloat16 once more.
    assert built.distance(first) < 7e-3
    assert np.array_equal(np.array(first.astype(mx.float32)), np.array(again.astype(mx.float32)))
    assert (
        grouped.prepare(built.experts, built.request, mx.float32)(built.x, built.indices, built.weights).dtype
        == mx.float32
    )


def test_products_of_plain_weights_are_right_for_many_rows(build_case, case_type):
    """MLX's product of ordered rows is not."""
    built = build_case(case_type(mode="plain", rows=40), "cuda")
    container = SwitchGLU(256, 128, 5)
    for name, stack in zip(("gate_proj", "up_proj", "down_proj"), built.experts.stacks(), strict=True):
        container[name].weight = stack.weight
    y = gather.experts(container, built.experts.activation, built.x, built.indices, built.weights)
    assert built.distance(y) < 5e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", activations.names())
def test_activations(activation, dtype, build_case, case_type):
    constants = CONSTANTS.get(activation, {})
    check(build_case(case_type(activation=activation, dtype=dtype, bias=True, **constants), "cuda"))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10, 16, 22, 32])
def test_top_k(top_k, dtype, build_case, case_type):
    check(build_case(case_type(top_k=top_k, experts=40, dtype=dtype), "cuda"))


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, bits, build_case, case_type):
    hidden, width = size
    check(build_case(case_type(hidden=hidden, width=width, bits=bits, group=32), "cuda"))


@pytest.mark.parametrize("options", MIXED, ids=str)
def test_mixed_formats(options, build_case, case_type):
    check(build_case(case_type(bias=True, **options), "cuda"))


SHARED = {
    "as_wide": dict(shared=128),
    "wider_and_weighed": dict(hidden=640, width=384, shared=1152, weighed=16, top_k=2),
    "weighed_by_a_quantised_row": dict(hidden=2048, width=512, experts=40, top_k=10, shared=512, weighed=8),
    "joined_halves_with_bias": dict(shared=640, joined=True, weighed=16, bias=True),
    "without_gate": dict(activation="relu2", shared=384, dtype=mx.float16),
    "a_warp_a_row": dict(hidden=96, width=160, bits=6, group=32, shared=96, weighed=16),
    "float32": dict(dtype=mx.float32, shared=256, weighed=32),
    "mxfp4": dict(mode="mxfp4", group=32, shared=256),
    "plain": dict(mode="plain", shared=256, weighed=16),
}


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_a_shared_expert_in_the_same_launches(options, build_case, case_type):
    built = build_case(case_type(**options), "cuda")
    check(built)
    check(built, tensor_cores=False)


def test_row_offsets_past_two_to_the_31_elements(build_case, case_type):
    """The last expert of a stack of 2.6 billion weights."""
    built = build_case(case_type(hidden=2048, width=1280, experts=1000, top_k=2), "cuda")
    indices = mx.array([[999, 0]], dtype=mx.uint32)
    from mlx_experts.engine.kernels import naive

    truth = np.array(naive.experts_in_float32(built.experts, built.x, indices, built.weights))
    built = dataclasses.replace(built, indices=indices, truth=truth)
    check(built)
    check(built, tensor_cores=False)


def test_an_activation_that_starts_anywhere(build_case, case_type):
    built = build_case(case_type(), "cuda")
    padded = mx.concatenate([mx.zeros((1, 3), mx.bfloat16), built.x], axis=1)
    mx.eval(padded)
    run = cuda.prepare(built.experts, mx.bfloat16)
    assert built.distance(run(padded[:, 3:], built.indices, built.weights)) < 5e-3


@pytest.mark.parametrize(
    ("right", "wrong", "tensor_cores"),
    [
        ("0x43004300, 0xEA", "0x43004301, 0xEA", True),
        ("128.0f * 17.0f : 128.0f", "128.0f * 17.0f : 127.0f", True),
        ("me_value(biases[at]) * sum", "me_value(biases[at])", False),
    ],
)
def test_a_planted_mistake_is_noticed(right, wrong, tensor_cores, build_case, case_type):
    built = build_case(case_type(), "cuda")
    run = cuda.prepare(built.experts, mx.bfloat16, tensor_cores=tensor_cores)
    plan = run.plan

    def planted(top_k: int, many: bool):
        pair = plan(top_k, many)
        assert right in pair.up.header
        up = dataclasses.replace(pair.up, header=pair.up.header.replace(right, wrong))
        return dataclasses.replace(pair, up=up)

    run.plan = planted
    assert not built.distance(run(built.x, built.indices, built.weights)) < 5e-3


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bulk", [False, True], ids=["registers", "copied"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_digits(bits, group, bulk, rows, build_case, case_type):
    """Codes as bytes, and weights brought by the copy engine."""
    if bulk and cuda.capability() < (9, 0):
        pytest.skip("the copy engine needs compute capability 9.0")
    built = build_case(case_type(bits=bits, group=group, hidden=640, width=384, top_k=4, rows=rows), "cuda")
    up, down = CutUp(3, 4, digits=True, bulk=bulk), CutDown(1, 8, digits=True, bulk=bulk)
    run = cuda.prepare(built.experts, built.x.dtype)
    run.plan = lambda top_k, many: cuda.mma_pair(built.experts, built.request, up, down, many=many)
    run.options["init_value"] = float("nan")
    first, again = (run(built.x, built.indices, built.weights) for _ in range(2))
    assert built.distance(first) < LIMITS[built.x.dtype]
    assert mx.array_equal(first, again)


ONE_LAUNCH = [
    (768, ("affine", 4, 64)),
    (768, ("mxfp4", 4, 32)),
    (768, ("nvfp4", 4, 16)),
    (512, ("affine", 4, 64)),
    (512, ("affine", 8, 64)),
    (512, ("mxfp4", 4, 32)),
]


@pytest.mark.parametrize("patience", [None, 0], ids=["waits", "never_waits"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("width", "stored"), ONE_LAUNCH, ids=str)
def test_one_launch(width, stored, dtype, patience, build_case, case_type):
    """Four calls at once, each with words of its own, against truth and against themselves."""
    mode, bits, group = stored
    sizes = dict(mode=mode, bits=bits, group=group, dtype=dtype)
    built = build_case(case_type(hidden=2048, width=width, experts=16, top_k=8, **sizes), "cuda")
    one = one_launch.plan(built.request, 132, 227 * 1024)
    assert one is not None
    launch = one_launch.build(cuda.BACKEND, built.experts, one)
    if patience is not None:
        header = re.sub(r"#define ME_PATIENCE \d+", f"#define ME_PATIENCE {patience}", launch.header)
        assert header != launch.header
        launch = dataclasses.replace(launch, header=header)
    held = arrays_of(built.experts) | {"x": built.x, "indices": built.indices, "weights": built.weights}
    states = [mx.full((one.words,), int(one_launch.NOTHING[:-1], 16), mx.uint32) for _ in range(4)]
    mx.eval(states)
    inputs = [[(held | {"state": state})[name] for name in launch.inputs] for state in states]
    dtypes = [*(array.dtype for array in inputs[0]), dtype]
    run = launch.make(cuda.BACKEND, dtypes, [built.truth.shape], init_value=float("nan"))
    outs = [run(given)[0] for given in inputs]
    mx.eval(outs)
    assert built.distance(outs[0]) < LIMITS[dtype]
    assert all(mx.array_equal(y, outs[0]) for y in outs[1:])
