"""Codes and inputs as bytes, and weights that the copy engine brings: the CUDA text on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.source import defines, text
from mlx_experts.engine.kernels.gpu.tiles.cuts import CutDown, CutUp
from mlx_experts.engine.kernels.gpu.tiles.form import TileForm
from mlx_experts.engine.kernels.request import Projection

LIMITS = {mx.bfloat16: 5e-3, mx.float16: 5e-3}
CASES = {
    "four_bits": dict(hidden=640, width=384, experts=9, top_k=8),
    "four_bits_in_groups_of_32_in_short_steps": dict(group=32, hidden=96, width=160, bias=True),
    "four_bits_in_groups_of_128": dict(group=128, hidden=384, width=256),
    "eight_bits": dict(bits=8, hidden=640, width=384, top_k=4),
    "eight_bits_in_short_steps": dict(bits=8, group=32, hidden=96, width=224),
    "four_then_eight": dict(down=("affine", 8, 64), top_k=1),
    "digits_then_pairs": dict(down=("affine", 6, 64)),
    "pairs_then_digits": dict(bits=6, group=128, hidden=384, down=("affine", 4, 64)),
    "float16": dict(dtype=mx.float16, bias=True),
    "no_gate": dict(activation="relu2", experts=33, top_k=32, width=256),
    "shared_and_weighed": dict(hidden=640, width=384, shared=768, weighed=8, top_k=2),
    "shared_of_joined_halves": dict(shared=640, joined=True, weighed=16, bias=True),
    "tokens": dict(rows=3, shared=384, weighed=8, hidden=384),
}
_PROBE = """
// Eight inputs a lane as they are held, and what is known of their group.
__global__ void probe(
    const float* in,
    float* out) {
  const int lane = threadIdx.x % 32;
  float v[8];
  for (int n = 0; n < 8; ++n) v[n] = in[lane * 8 + n];
  const me_digits d = me_digits_of(v);
  for (int m = 0; m < 2; ++m) {
    for (int p = 0; p < 4; ++p) {
      const int high = int8_t(d.high[m] >> p * 8 & 0xFF), low = int8_t(d.low[m] >> p * 8 & 0xFF);
      out[lane * 8 + me_input(m, p)] = d.group.by * float(high * 256 + low);
    }
  }
  out[256 + lane] = d.group.by;
  out[288 + lane] = d.group.sum;
}
"""


@pytest.fixture
def held(host_cuda):
    """256 inputs as a warp holds them: the values, the groups' units, and the groups' sums."""

    def run(values, bits=4, group=64):
        p = Projection("affine", bits, group, 256, 256, "bfloat16")
        form = TileForm.of(p, 2, digits=True)
        header = text("prelude.cu") + defines(form.settings(16)) + text("tiles/tensor.cu") + form.texts
        source = f"{header}namespace mlx::core::cu {{{_PROBE}}}"
        out = host_cuda.call(source, [values], 320, groups=1, threads=32)
        return out[:256], out[256:288].repeat(8), out[288:].repeat(8)

    return run


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (4, 128), (8, 64)])
def test_an_input_is_held_within_2_to_the_minus_15_of_the_groups_largest(bits, group, held):
    values = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    # Just below and above where the high byte would be 128.
    values[[3, 70, 130, 200]] = [1.9921631, -1.9921631, 1.9921566, 1.9921875]
    got, _, sums = held(values, bits, group)
    largest = np.abs(values).reshape(-1, group).max(1).repeat(group)
    assert (np.abs(got - values) <= largest * 2.0**-15).all()
    np.testing.assert_allclose(sums, got.reshape(-1, group).sum(1).repeat(group), rtol=1e-6)


def test_zeros_and_the_smallest_inputs_are_held(held):
    values = np.zeros(256, np.float32)
    values[64:128], values[128:192] = 1e-38, -(2.0**-126)
    got, _, _ = held(values)
    assert (got[:64] == 0).all()
    assert (np.abs(got - values) <= 2.0**-126).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(value, held):
    values = np.ones(256, np.float32)
    values[5] = value
    _, units, _ = held(values)
    assert not np.isfinite(units[:64]).any()
    assert np.isfinite(units[64:]).all()


@pytest.mark.parametrize("bulk", [False, True], ids=["registers", "copied"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_text_matches_truth_on_the_cpu(options, bulk, build_case, case_type, host_cuda):
    built = build_case(case_type(**options), "cuda")
    request, many = built.request, built.request.rows > 1
    up, down = CutUp(3, 2, digits=True, bulk=bulk), CutDown(1, 6, digits=True, bulk=bulk)
    if bulk and not all(form.copies_whole for form in (up.form(request), *down.forms(request))):
        up, down = CutUp(3, 2, digits=True), CutDown(2, 3, digits=True)
    pair = cuda.mma_pair(built.experts, request, up, down, many=many)
    assert built.distance(built.run_on(host_cuda, cuda.BACKEND, pair, lambda t: t)) < LIMITS[built.x.dtype]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("c * 16 + d : c + d", "c * 16 - d : c + d"),
        ("high ? 256.0f : 1.0f", "high ? 255.0f : 1.0f"),
        ("me_value(p.b.b) * in.sum1", "me_value(p.b.a) * in.sum1"),
        ("^ 0x80808080u", "^ 0x80808000u"),
        ("rows + lane % 2 * (4 * row_bytes)", "rows + lane % 2 * (3 * row_bytes)"),
        ("lane * (rows / 2)", "lane * (rows / 2 - 1)"),
    ],
)
def test_a_planted_mistake_is_noticed(right, wrong, build_case, case_type, host_cuda):
    built = build_case(case_type(hidden=640), "cuda")
    up, down = CutUp(3, 2, digits=True, bulk=True), CutDown(1, 6, digits=True, bulk=True)
    pair = cuda.mma_pair(built.experts, built.request, up, down)
    whole = "".join((pair.up.header, pair.up.source, pair.down.header, pair.down.source))
    assert right in whole
    mistaken = built.run_on(host_cuda, cuda.BACKEND, pair, lambda t: t.replace(right, wrong))
    assert not built.distance(mistaken) < 5e-3
