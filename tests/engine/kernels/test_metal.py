"""The Metal text that MLX would compile, compiled with address spaces and run on the CPU: no Mac needed."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.gpu import metal
from mlx_experts.engine.kernels.gpu.source import activation_text, text

LIMITS = {mx.bfloat16: 5e-3, mx.float16: 5e-3, mx.float32: 1e-5}
CASES = {
    "affine_4_bits": dict(),
    "affine_2_bits_top_8_in_device_space": dict(bits=2, group=32, experts=9, top_k=8, dtype=mx.float16),
    "affine_3_then_6_bits": dict(bits=3, down=("affine", 6, 64), bias=True, dtype=mx.float32),
    "affine_5_then_8_bits": dict(bits=5, group=32, hidden=96, width=160, down=("affine", 8, 32)),
    "mxfp4_clamped": dict(mode="mxfp4", group=32, activation="swiglu_oai", alpha=1.702, limit=7.0, bias=True),
    "mxfp8_no_gate": dict(mode="mxfp8", bits=8, group=32, activation="relu2", top_k=1),
    "nvfp4_global_scale": dict(mode="nvfp4", group=16, global_scale=True, hidden=96, width=96),
    "plain_bfloat16": dict(mode="plain", top_k=8, experts=12),
    "plain_float16": dict(mode="plain", dtype=mx.float16),
    "plain_float32": dict(mode="plain", dtype=mx.float32, activation="geglu"),
    "several_tokens": dict(rows=3, mode="mxfp4", group=32, bias=True),
    "several_tokens_of_top_8": dict(rows=5, top_k=8, experts=9, dtype=mx.float32),
}


def same(text: str) -> str:
    """No change."""
    return text


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_text_matches_truth_on_the_cpu(options, build_case, case_type, host_metal):
    built = build_case(case_type(**options), "metal")
    pair = metal.launches(built.experts, built.request, many=built.request.rows > 1)
    assert built.distance(built.run_on(host_metal, metal.BACKEND, pair, same)) < LIMITS[built.x.dtype]


def test_the_same_token_gives_the_same_bits_twice(build_case, case_type, host_metal):
    built = build_case(case_type(), "metal")
    pair = metal.launches(built.experts, built.request)
    first, second = (built.run_on(host_metal, metal.BACKEND, pair, same) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("me_value(biases[at]) * sum", "me_value(biases[at])"),
        ("c < ME_H / ME_CHUNK", "c + 1 < ME_H / ME_CHUNK"),
        ("indices[row / ME_F]", "indices[0]"),
    ],
)
def test_a_planted_mistake_is_noticed(right, wrong, build_case, case_type, host_metal):
    built = build_case(case_type(), "metal")
    pair = metal.launches(built.experts, built.request)
    assert right in pair.up.header + pair.up.source
    mistaken = built.run_on(host_metal, metal.BACKEND, pair, lambda t: t.replace(right, wrong))
    assert not built.distance(mistaken) < 5e-3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("x += token * ME_H", "x += 0"), ("y += token * ME_H", "y += 0"), ("token * ME_K", "0")],
)
def test_a_planted_mistake_between_tokens_is_noticed(right, wrong, build_case, case_type, host_metal):
    built = build_case(case_type(rows=3), "metal")
    pair = metal.launches(built.experts, built.request, many=True)
    assert right in pair.up.source + pair.down.source
    mistaken = built.run_on(host_metal, metal.BACKEND, pair, lambda t: t.replace(right, wrong))
    assert not built.distance(mistaken) < 5e-3


def test_a_pointer_that_loses_its_address_space_does_not_compile(build_case, case_type, host_metal):
    built = build_case(case_type(), "metal")
    pair = metal.launches(built.experts, built.request)
    with pytest.raises(RuntimeError, match=r"no matching function|address space"):
        built.run_on(
            host_metal,
            metal.BACKEND,
            pair,
            lambda t: t.replace("#define ME_DEVICE device", "#define ME_DEVICE"),
        )


def test_every_activation_means_the_same_in_c(host_metal):
    """Each C form, through Metal's prelude, against the table's array form."""
    gates = [-90.0, -7.3, -1.1, -0.02, 0.0, 0.4, 3.0, 8.5, 90.0]
    ups = [-8.0, -0.3, 1.7, 7.5]
    request = [activations.make(n, alpha=1.7, limit=lim) for n in activations.names() for lim in (0.0, 2.5)]
    request = [f for f in request if activation_text(f) is not None]
    bodies = [activation_text(f).replace("me_activation", f"form_{i}") for i, f in enumerate(request)]
    calls = "\n".join(
        f"if (group == {i}) y[group * 36 + lane] = form_{i}(g, u);" for i in range(len(request))
    )
    source = (
        f"{text('prelude.metal')}{''.join(bodies)}"
        "[[kernel]] void forms(\n  const device float* gs [[buffer(0)]],\n"
        "  const device float* us [[buffer(1)]],\n"
        "  device float* y [[buffer(2)]],\n  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],\n"
        "  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {\n"
        "const int group = threadgroup_position_in_grid.x;\n"
        "for (int lane = thread_index_in_simdgroup; lane < 36; lane += 32) {\n"
        f"const float g = gs[lane / 4], u = us[lane % 4];\n{calls}\n}}\n}}\n"
    )
    got = host_metal.call(source, [gates, ups], len(request) * 36, groups=len(request), threads=32)
    g = mx.repeat(mx.array(gates), 4)
    u = mx.concatenate([mx.array(ups)] * len(gates))
    for i, f in enumerate(request):
        wanted = activations.apply(f, g if f.gated else None, u)
        mine = mx.array(got[i * 36 : (i + 1) * 36])
        error = (mx.abs(mine - wanted) / (mx.abs(wanted) + 1.0)).max().item()
        assert error < 5e-6, f.name


def test_metal_is_declined_where_there_is_none():
    decline = metal.unavailable()
    assert (decline is None) == mx.metal.is_available()


def test_shapes_are_cut_into_whole_simd_groups(build_case, case_type):
    built = build_case(case_type(), "metal")
    pair = metal.launches(built.experts, dataclasses.replace(built.request, top_k=32))
    assert pair.up.groups * pair.up.warps >= 32 * built.request.expert_width
    assert pair.down.groups * pair.down.warps * 2 >= built.request.input_width
