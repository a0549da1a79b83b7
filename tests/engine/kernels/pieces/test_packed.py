"""A launch reads what another left in one array, at its place there, on both kinds of GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels.gpu.pieces import delta_step, row_product, truth
from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.kernels.gpu.pieces.packed import (
    Output,
    filled,
    laid,
    output_text,
    pack,
    viewed,
)
from mlx_experts.engine.kernels.gpu.pieces.row_product import Norm, Product, RowProduct

KINDS = ("cuda", "metal")
LIMIT = 3e-3


@pytest.mark.parametrize("dtypes", [(mx.bfloat16,) * 3, (mx.float32, mx.bfloat16, mx.uint32)], ids=str)
def test_views_of_what_is_laid_in_one_array_are_the_values(dtypes):
    values = {str(i): mx.arange(5 + i, 10 + i).reshape(1, 5).astype(d) for i, d in enumerate(dtypes)}
    made = laid(values, "cuda")
    assert len({id(value.array) for value in made.values()}) == 1
    for name, value in values.items():
        assert made[name].place.begin % 16 == 0
        assert viewed(made[name]).dtype == value.dtype
        assert mx.array_equal(viewed(made[name]), value)
    alone = filled([mx.zeros((2,)), *made.values()], [mx.ones((2,)), *values.values()])
    assert mx.array_equal(alone[0], mx.ones((2,)))


def test_outputs_of_several_types_share_no_array_on_metal():
    outputs = {"y": Output.row(8, mx.bfloat16), "z": Output.row(8, mx.float32)}
    assert pack(outputs, "metal") is None
    assert output_text(outputs, pack(outputs, "cuda")) == (
        ("out",),
        "auto y = reinterpret_cast<__nv_bfloat16*>(out + 0);\nauto z = out + 4;\n",
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mistake", [None, "gate", "residual"])
def test_a_product_finds_its_gate_and_residual_in_the_array_of_the_launch_before(
    kind, mistake, make_matrix, on_host
):
    mx.random.seed(2)
    asked = RowProduct(128, (Product(make_matrix(128, 64)),), gate="sigmoid", residual=True)
    piece = row_product.build(asked, row_product.backend_of(kind), kind, mx.bfloat16)
    sizes = {"q": 40, "gate": 128, "residual": 64}
    values = {name: mx.random.normal((1, 1, size)).astype(mx.bfloat16) for name, size in sizes.items()}
    before, x = laid(values, kind), mx.random.normal((1, 1, 128)).astype(mx.bfloat16)
    token = {"x": x, "gate": before["gate"], "residual": before["residual"]}
    launch, arrays = piece.prepared(*token.values())
    assert launch.inputs[:2] == ("x", "me_packed0")
    assert len(arrays) == len(launch.inputs) == len(piece.held) - 1

    def misplaced(text):
        place = f"auto {mistake} = me_packed0 + "
        assert mistake is None or place in text
        return text.replace(place, f"{place}8 + ")

    got = on_host(kind, piece, token, misplaced)["y0"]
    far = truth.distance(got, truth.row_product(asked, {"x": x, **values})["y0"])
    assert far < LIMIT if mistake is None else far > 10 * LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_both_rows_that_a_product_adds_may_lie_in_arrays_of_two_launches(kind, make_matrix, on_host):
    mx.random.seed(3)
    asked = RowProduct(128, (Product(make_matrix(128, 24)),), Norm(None, 1e-6), added=0.5)
    piece = row_product.build(asked, row_product.backend_of(kind), kind, mx.float16)
    rows = {name: mx.random.normal((1, 1, 128)).astype(mx.float16) for name in ("x", "branch")}
    other = mx.random.normal((1, 1, 24)).astype(mx.float16)
    token = {name: laid({"other": other, name: row}, kind)[name] for name, row in rows.items()}
    got, want = on_host(kind, piece, token), truth.row_product(asked, rows)
    for name in want:
        assert truth.distance(got[name], want[name]) < LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_net_reads_the_rows_of_its_projections_from_one_array(kind, on_host):
    mx.random.seed(4)
    step = DeltaStep(
        key_heads=1,
        value_heads=2,
        key_dim=16,
        value_dim=8,
        kernel=4,
        by_key_head=True,
        gate="silu",
        eps=1e-6,
        conv=mx.random.normal((48, 4, 1)),
        decay=mx.random.normal((2,)),
        shift=mx.random.normal((2,)),
        norm=mx.random.normal((8,)),
    )
    piece = delta_step.build(step, row_product.backend_of(kind), kind, mx.float32)
    rows = {"r0": mx.random.normal((1, 1, 64)), "r1": mx.random.normal((1, 1, 4))}
    memory = {"past": mx.random.normal((1, 3, 48)), "memory": mx.random.normal((1, 2, 8, 16))}
    made = laid({"stream": mx.zeros((1, 1, 24)), **rows}, kind)
    got = on_host(kind, piece, {**{name: made[name] for name in rows}, **memory})
    want = truth.delta_step(step, {**rows, **memory})
    for name in want:
        assert truth.distance(got[name], want[name]) < 2e-6
