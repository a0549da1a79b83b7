"""CUDA text without a GPU: what is launched for which request, the text run on the CPU and given to nvcc."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.source import Launch
from mlx_experts.engine.kernels.gpu.tiles import cuts

HOPPER = (9, 0)
LIMITS = {mx.bfloat16: 5e-3, mx.float16: 5e-3, mx.float32: 1e-5}

TENSOR_CORES = {
    "groups_of_32": dict(group=32, hidden=384),
    "groups_of_64_short_unit": dict(hidden=640, width=384, experts=9, top_k=8),
    "groups_of_128": dict(group=128, hidden=384, width=256),
    "eight_bits": dict(bits=8, group=128, down=("affine", 8, 32)),
    "mixed_bits": dict(down=("affine", 8, 64), top_k=1),
    "six_bit_down": dict(down=("affine", 6, 64)),
    "plain_down": dict(down=("plain", 16, 0)),
    "float16_with_bias": dict(dtype=mx.float16, bias=True),
    "no_gate": dict(activation="relu2", experts=33, top_k=32, width=256),
    "shared": dict(shared=128),
    "shared_wide_and_weighed": dict(hidden=640, width=384, shared=768, weighed=8, top_k=2),
    "shared_short_unit_of_joined_halves": dict(shared=640, joined=True, weighed=16, bias=True),
    "shared_without_gate": dict(activation="relu2", shared=384, dtype=mx.float16),
    "shared_with_a_plain_down": dict(down=("plain", 16, 0), shared=96, weighed=16),
    "two_bits": dict(bits=2, hidden=384),
    "three_bits_in_short_steps": dict(bits=3, group=32, hidden=96, width=160, bias=True),
    "five_bits_in_one_group_a_step": dict(bits=5, group=128, hidden=512, width=256),
    "five_bits_in_float16": dict(bits=5, group=32, hidden=288, width=96, dtype=mx.float16),
    "six_bits": dict(bits=6, group=128, hidden=384, width=256),
    "eight_bits_in_short_steps": dict(bits=8, group=32, hidden=96, width=224),
    "mxfp4": dict(mode="mxfp4", group=32, hidden=640, width=384, experts=9, top_k=8),
    "mxfp4_in_short_steps": dict(mode="mxfp4", group=32, hidden=352, width=160, bias=True),
    "mxfp4_in_float16": dict(mode="mxfp4", group=32, dtype=mx.float16, activation="relu2", hidden=192),
    "mxfp8": dict(mode="mxfp8", bits=8, group=32, hidden=160, width=96),
    "nvfp4": dict(mode="nvfp4", group=16, hidden=640, width=384),
    "nvfp4_in_short_steps": dict(mode="nvfp4", group=16, global_scale=True, hidden=352, width=96),
    "nvfp4_of_odd_groups": dict(mode="nvfp4", group=16, dtype=mx.float16, hidden=96, width=160),
    "plain": dict(mode="plain", hidden=160, width=288),
    "plain_float16": dict(mode="plain", dtype=mx.float16, hidden=96),
    "mxfp8_then_plain": dict(mode="mxfp8", bits=8, group=32, down=("plain", 16, 0)),
    "affine_then_nvfp4": dict(down=("nvfp4", 4, 16), width=96),
    "shared_in_mxfp4": dict(mode="mxfp4", group=32, shared=96, hidden=96, weighed=16),
    "shared_in_plain_of_short_steps": dict(mode="plain", shared=160, hidden=96, weighed=16, joined=True),
    "two_tokens": dict(rows=2),
    "tokens_in_mxfp4": dict(rows=5, mode="mxfp4", group=32, hidden=352, width=160, top_k=4, bias=True),
    "tokens_with_a_weighed_shared_expert": dict(rows=3, shared=384, weighed=8, hidden=384, bits=8),
    "tokens_in_blocks_of_twelve_tiles": dict(rows=3, width=96, shared=160, weighed=16, hidden=384, group=32),
    "tokens_with_a_plain_down": dict(rows=3, down=("plain", 16, 0), shared=96, weighed=16),
}
ROWS = {
    "float32": dict(dtype=mx.float32),
    "three_bits": dict(bits=3, group=32, hidden=96, width=160, bias=True, dtype=mx.float32),
    "nvfp4": dict(mode="nvfp4", group=16, global_scale=True, hidden=96, width=96, dtype=mx.float32),
    "shared": dict(dtype=mx.float32, shared=192, weighed=32, joined=True, bias=True),
    "shared_of_another_width": dict(
        bits=6, group=32, hidden=96, width=64, shared=160, weighed=16, dtype=mx.float32
    ),
    "tokens_with_a_shared_expert": dict(rows=3, dtype=mx.float32, shared=192, weighed=32, bias=True),
}


def same(text: str) -> str:
    """No change."""
    return text


@pytest.mark.parametrize("options", TENSOR_CORES.values(), ids=TENSOR_CORES)
def test_tensor_core_text_matches_truth_on_the_cpu(options, build_case, case_type, host_cuda):
    built = build_case(case_type(**options), "cuda")
    pair = cuda.launches(built.experts, built.request, HOPPER, many=built.request.rows > 1)
    assert (pair.up.label, pair.down.label) == ("experts_up_mma", "experts_down_mma")
    assert built.distance(built.run_on(host_cuda, cuda.BACKEND, pair, same)) < LIMITS[built.x.dtype]


@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
def test_warp_per_row_text_matches_truth_on_the_cpu(options, build_case, case_type, host_cuda):
    built = build_case(case_type(**options), "cuda")
    pair = cuda.launches(built.experts, built.request, HOPPER, many=built.request.rows > 1)
    assert (pair.up.label, pair.down.label) == ("experts_up", "experts_down")
    assert built.distance(built.run_on(host_cuda, cuda.BACKEND, pair, same)) < LIMITS[built.x.dtype]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("me_swap(low_total, 2)", "me_swap(low_total, 1)"),
        ("128.0f * 17.0f : 128.0f", "128.0f * 17.0f : 127.0f"),
        ("count * ME_UNIT && step < steps", "count * ME_UNIT && step + 1 < steps"),
    ],
)
def test_a_planted_mistake_in_the_text_is_noticed(right, wrong, build_case, case_type, host_cuda):
    built = build_case(case_type(hidden=640), "cuda")
    pair = cuda.launches(built.experts, built.request, HOPPER)
    assert right in pair.up.header + pair.up.source
    mistaken = built.run_on(host_cuda, cuda.BACKEND, pair, lambda text: text.replace(right, wrong))
    # Poisoned memory makes some mistakes NaN, which compares as false.
    assert not built.distance(mistaken) < 5e-3


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        (dict(mode="mxfp4", group=32), "w << (12 - 4 * i)", "w << (8 - 4 * i & 31)"),
        (dict(mode="mxfp4", group=32), "0x01C001C0u", "0x018001C0u"),
        (dict(mode="mxfp8", bits=8, group=32), "0x07F007F0u", "0x07F007E0u"),
        (dict(mode="nvfp4", group=16), "me_scale(p.s, 1) * d0", "me_scale(p.s, 0) * d0"),
        (dict(bits=6), "at + 4 * ME_BITS", "at + 3 * ME_BITS"),
        (dict(mode="plain"), "i % 2 ? 0x7632", "i % 2 ? 0x5410"),
        (dict(hidden=160, group=32), "step * 4 + t < chunks", "step * 4 + t < chunks - 1"),
        (dict(rows=3), "x += token * ME_H", "x += 0"),
        (dict(rows=3), "group % pairs % ME_K", "0"),
        (dict(rows=3), "int64_t(token) * ME_PITCH", "0"),
    ],
)
def test_a_planted_mistake_of_a_format_or_a_token_is_noticed(
    options, right, wrong, build_case, case_type, host_cuda
):
    built = build_case(case_type(**options), "cuda")
    pair = cuda.launches(built.experts, built.request, HOPPER, many=built.request.rows > 1)
    assert right in pair.up.header + pair.up.source
    mistaken = built.run_on(host_cuda, cuda.BACKEND, pair, lambda text: text.replace(right, wrong))
    assert not built.distance(mistaken) < 5e-3


def test_launches_without_tensor_cores_are_a_warp_a_row(build_case, case_type):
    built = build_case(case_type(), "cuda")
    pair = cuda.launches(built.experts, built.request, None)
    assert (pair.up.label, pair.down.label) == ("experts_up", "experts_down")


@pytest.mark.parametrize("hidden", [128, 1408, 2048, 4096, 7168])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_cut_fits_the_shared_memory_of_every_chip(hidden, bits, build_case, case_type):
    request = build_case(case_type(bits=bits), "cuda").request
    up = dataclasses.replace(request.up, cols=hidden, rows=1536)
    down = dataclasses.replace(request.down, cols=1536, rows=hidden)
    request = dataclasses.replace(request, gate=up, up=up, down=down, top_k=8)
    cut_up, cut_down = cuts.cut_up(request), cuts.cut_down(request)
    assert cut_up.layout(request)[1] <= 99 * 1024
    assert cut_down.layout(request)[1] <= 99 * 1024


def test_a_kernel_changes_its_name_with_its_text_and_dtypes():
    launch = Launch("label", ("x",), ("y",), "header", "source", groups=1, warps=1)
    names = {
        launch.name([mx.float32, mx.float32]),
        launch.name([mx.bfloat16, mx.float32]),
        dataclasses.replace(launch, source="other").name([mx.float32, mx.float32]),
        dataclasses.replace(launch, header="other").name([mx.float32, mx.float32]),
    }
    assert len(names) == 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(dtype=mx.float16, bits=6), dict(mode="mxfp4", group=32)])
def test_nvcc_takes_the_text(options, build_case, case_type, cuda_text_of, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    built = build_case(case_type(**options), "cuda")
    for text in cuda_text_of(built, cuda.launches(built.experts, built.request, HOPPER)):
        file = tmp_path / "kernel.cu"
        file.write_text(f"#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cstdint>\n{text}")
        command = [nvcc, "-arch=sm_80", "-cubin", "-std=c++17", "-o", str(tmp_path / "out"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
