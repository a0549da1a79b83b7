"""Each head's part of a row times a matrix of its own, for CUDA and Metal, against float64."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from planted import planted

from mlx_experts.engine.kernels.expert_weights import read_stack
from mlx_experts.engine.kernels.gpu.pieces import head_product, truth
from mlx_experts.engine.kernels.gpu.pieces.head_product import HeadProduct
from mlx_experts.engine.kernels.gpu.pieces.packed import laid
from mlx_experts.engine.kernels.gpu.pieces.row_product import backend_of

KINDS = ("cuda", "metal")
LIMITS = {mx.bfloat16: 3e-3, mx.float16: 1e-3, mx.float32: 2e-6}
FORMATS = {
    "affine_4_g64": (64, 4, "affine"),
    "affine_3_g32": (32, 3, "affine"),
    "affine_8_g32": (32, 8, "affine"),
    "mxfp4": (32, 4, "mxfp4"),
    "mxfp8": (32, 8, "mxfp8"),
    "nvfp4": (16, 4, "nvfp4"),
    "plain": None,
}


def product(heads, width, rows, pitch, stored="affine_4_g64", dtype=mx.bfloat16) -> HeadProduct:
    """Random matrices."""
    layer = MultiLinear(width, rows, heads)
    layer.set_dtype(dtype)
    if FORMATS[stored] is not None:
        layer = layer.to_quantized(*FORMATS[stored])
    stack = read_stack(layer, MultiLinear, QuantizedMultiLinear)
    assert stack is not None
    return HeadProduct(stack, pitch)


def distance(kind, asked, on_host, dtype=mx.bfloat16, change=lambda t: t):
    """Distance to the truth; the row lies behind another in one array."""
    assert head_product.check(asked) is None
    piece = head_product.build(asked, backend_of(kind), kind, dtype)
    x = mx.random.normal((1, asked.heads, 1, asked.pitch)).astype(dtype)
    row = laid({"before": mx.zeros((1, 1, 3), dtype), "x": x}, kind)["x"]
    return truth.distance(on_host(kind, piece, {"x": row}, change)["y"], truth.head_product(asked, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", FORMATS)
def test_every_format(stored, kind, on_host):
    mx.random.seed(1)
    assert distance(kind, product(3, 64, 32, 96, stored), on_host) < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "width", "rows", "pitch", "stored"),
    [(4, 128, 512, 192, "affine_4_g64"), (5, 512, 128, 512, "affine_4_g64"), (2, 24, 48, 28, "plain")],
)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_widths_that_fill_a_warp_and_that_do_not(heads, width, rows, pitch, stored, dtype, kind, on_host):
    mx.random.seed(2)
    asked = product(heads, width, rows, pitch, stored, dtype)
    assert distance(kind, asked, on_host, dtype) < LIMITS[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(group / ME_GROUPS) * ME_PITCH", "(group / ME_GROUPS) * ME_H"),
        ("total[pass] += me_swap(total[pass], d)", "total[pass] += 0.0f * me_swap(total[pass], d)"),
    ],
)
def test_a_planted_mistake_is_noticed(right, wrong, kind, on_host):
    mx.random.seed(3)
    found = distance(kind, product(3, 64, 32, 96), on_host, change=planted(right, wrong))
    assert not found < LIMITS[mx.bfloat16]


def test_a_group_has_rows_of_one_head():
    for heads, width, rows in [(128, 128, 512), (128, 512, 128), (16, 64, 512), (3, 64, 32), (2, 32, 24)]:
        asked = product(heads, width, rows, width, "plain" if width < 64 else "affine_4_g64")
        how = head_product.cut(asked)
        assert how is not None
        assert rows % how.unit == 0
    assert head_product.cut(product(128, 128, 512, 128)).unit == 256


@pytest.mark.parametrize(("width", "rows", "rule"), [(4104, 8, "width"), (64, 33, "rows")])
def test_what_does_not_fit_is_left_to_mlx(width, rows, rule):
    verdict = head_product.check(product(2, width, rows, width, "plain"))
    assert verdict is not None
    assert verdict.rule == rule
