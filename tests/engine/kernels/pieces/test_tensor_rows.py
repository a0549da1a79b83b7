"""The tensor-core form of a row product, its text run on the CPU against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.gpu.pieces import row_product, tensor_rows, truth
from mlx_experts.engine.kernels.gpu.pieces.row_product import Cut, Heads, Norm, Product, RowProduct, Turn
from mlx_experts.engine.kernels.gpu.pieces.tensor_rows import TensorCut
from mlx_experts.engine.kernels.gpu.tiles.form import TileForm
from mlx_experts.engine.kernels.request import Projection

LIMITS = {mx.bfloat16: 3e-3, mx.float16: 1e-3}
# Of float32 outputs: x keeps 16 bits.
WIDE_LIMIT = 2e-5
FORMATS = {
    **{f"affine_{bits}_g64": ("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)},
    "affine_4_g32": ("affine", 4, 32),
    "affine_3_g128": ("affine", 3, 128),
    "affine_8_g128": ("affine", 8, 128),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
    "plain": ("plain", 16, 0),
}


def weight(size: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """A norm's weight."""
    return (1.0 + 0.3 * mx.random.normal((size,))).astype(dtype)


def frequencies(dims: int) -> mx.array:
    """The plain frequencies of a rotation."""
    return 1.0 / 10000.0 ** (mx.arange(0, dims, 2) / dims)


def token_of(asked: RowProduct, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A random row and what goes with it."""
    shaped = {"x": asked.width, "branch": asked.width, "residual": asked.products[0].rows}
    shaped["gate"] = asked.width // asked.gate_width
    token = {n: mx.random.normal((1, 1, s)).astype(dtype) for n, s in shaped.items()}
    return token | {"offset": mx.array([4321] * 4, dtype=mx.int32)}


def run(asked, how, on_host, dtype=mx.bfloat16, change=lambda t: t, wide=False):
    """Distance of every output to the truth, by name."""
    assert row_product.check(asked) is None
    assert tensor_rows.takes(row_product.matrices(asked, dtype))
    backend = row_product.backend_of("cuda")
    piece = row_product.build(asked, backend, "cuda", dtype, join=True, how=how, wide=wide)
    given = token_of(asked, dtype)
    token = {name: given[name] for name in piece.tokens}
    want = truth.row_product(asked, token)
    got = on_host("cuda", piece, token, change)
    assert set(got) == set(want)
    return {name: truth.distance(got[name], want[name]) for name in want}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format(name, make_matrix, on_host):
    """A norm, a branch, a bias, and rows that do not fill their tiles."""
    mx.random.seed(1)
    width = 640 if FORMATS[name][2] == 128 else 576
    products = tuple(Product(make_matrix(width, rows, FORMATS[name], bias=rows == 24)) for rows in (40, 24))
    asked = RowProduct(width, products, Norm(weight(width), 1e-5), added=0.5)
    for output, far in run(asked, TensorCut(2, 2), on_host).items():
        assert far < LIMITS[mx.bfloat16], output


@pytest.mark.parametrize("name", ["affine_4_g64", "affine_8_g64", "mxfp4", "plain"])
def test_float16(name, make_matrix, on_host):
    mx.random.seed(2)
    matrix = make_matrix(384, 33, FORMATS[name], dtype=mx.float16)
    asked = RowProduct(384, (Product(matrix),), Norm(weight(384, mx.float16), 1e-6, offset=1.0))
    assert run(asked, TensorCut(1, 1), on_host, mx.float16)["y0"] < LIMITS[mx.float16]


@pytest.mark.parametrize("name", ["affine_4_g64", "affine_6_g64", "mxfp4", "plain"])
@pytest.mark.parametrize("gate", [None, "sigmoid"])
def test_a_row_as_it_is_and_one_behind_a_gate(gate, name, make_matrix, on_host):
    """With a residual and a scale; a row of bfloat16 as it is has one part only."""
    mx.random.seed(3)
    product = Product(make_matrix(2880, 40, FORMATS[name], bias=True))
    asked = RowProduct(2880, (product,), gate=gate, gate_width=64, residual=True, multiplier=0.22)
    assert row_product.matrices(asked, mx.bfloat16).halves == (1 if gate is None else 2)
    assert run(asked, TensorCut(1, 4), on_host)["y0"] < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("name", ["affine_4_g64", "affine_8_g64", "nvfp4", "plain"])
def test_sums_are_those_of_float32(name, make_matrix, on_host):
    """To what the two parts of x leave out."""
    mx.random.seed(4)
    asked = RowProduct(1152, (Product(make_matrix(1152, 32, FORMATS[name])),), Norm(weight(1152), 1e-6))
    assert run(asked, TensorCut(2, 2), on_host, wide=True)["y0"] < WIDE_LIMIT


@pytest.mark.parametrize(
    ("d", "dims", "first", "interleaved", "late"),
    [(64, 64, 0, False, False), (128, 32, 48, True, False), (80, 80, 0, False, True)],
)
def test_heads_are_normalised_and_turned(d, dims, first, interleaved, late, make_matrix, on_host):
    mx.random.seed(5)
    turn = Turn(frequencies(dims), dims, interleaved, factor=1.2, first=first)
    heads = [Heads(d, Norm(weight(d), 1e-6), turn, late) for _ in range(2)]
    products = (
        Product(make_matrix(256, 2 * d, bias=True), heads[0], clip=1.5),
        Product(make_matrix(256, d), heads[1]),
        Product(make_matrix(256, 40)),
    )
    asked = RowProduct(256, products, Norm(weight(256), 1e-6))
    how = tensor_rows.cut(row_product.matrices(asked, mx.bfloat16))
    assert how.unit == d
    for name, far in run(asked, how, on_host).items():
        assert far < LIMITS[mx.bfloat16], name


def test_a_packed_gate_and_parts_of_a_joined_matrix(make_matrix, on_host):
    mx.random.seed(6)
    joined = make_matrix(128, 256 + 64, bias=True)
    queries, keys = (row_product.stack_part(joined, first, rows) for first, rows in ((0, 256), (256, 64)))
    heads = Heads(64, Norm(weight(64), 1e-6, 1.0), Turn(frequencies(16), 16))
    asked = RowProduct(128, (Product(queries, heads, packed=True), Product(keys, heads)))
    distances = run(asked, TensorCut(4, 1), on_host)
    assert set(distances) == {"y0", "g0", "y1"}
    assert all(far < LIMITS[mx.bfloat16] for far in distances.values()), distances


@pytest.mark.parametrize("how", [TensorCut(1, 1, words=4), TensorCut(3, 2, words=32), TensorCut(2, 8)])
def test_every_cut_gives_the_same(how, make_matrix, on_host):
    mx.random.seed(7)
    asked = RowProduct(2240, (Product(make_matrix(2240, 72)),), Norm(weight(2240), 1e-6), added=1.0)
    assert all(far < LIMITS[mx.bfloat16] for far in run(asked, how, on_host).values())


MISTAKES = {
    "the norm's factor is left out": ("v *= ME_SUM_BY * factor", "v *= ME_SUM_BY"),
    "the low parts are left out": ("me_place(v)] = me_fragment(p[h])", "me_place(v)] = me_fragment(p[0])"),
    "late vectors are early ones": ("now = i >= early", "now = false"),
    "a warp's part of a row": ("const int first = part * units", "const int first = 0 * units"),
    "the last rows": ("min(row0 + g + 8, last)", "row0 + g"),
    "the sums of groups": ("counts && first + column < count ? sums", "counts && first + column < 1 ? sums"),
    "another barrier": ("__syncthreads();\nfloat factor", "float factor"),
    "a matrix's first row": ("row0 += team * 16", "row0 += 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed(name, make_matrix, on_host):
    mx.random.seed(8)
    asked = RowProduct(2240, (Product(make_matrix(2240, 40)),), Norm(weight(2240), 1e-6))

    def change(text):
        right, wrong = MISTAKES[name]
        assert right in text
        return text.replace(right, wrong)

    wide = run(asked, TensorCut(2, 2), on_host, change=change, wide=True)["y0"]
    assert not wide < WIDE_LIMIT


def test_a_missing_barrier_is_noticed(make_matrix, on_host):
    """Without sums between lanes a warp is far ahead of those whose fragments it reads."""
    mx.random.seed(9)
    asked = RowProduct(2240, (Product(make_matrix(2240, 16, FORMATS["plain"])),))

    def change(text):
        assert "__syncthreads();\nfloat low_total" in text
        return text.replace("__syncthreads();\nfloat low_total", "float low_total")

    assert not run(asked, TensorCut(1, 2), on_host, change=change)["y0"] < LIMITS[mx.bfloat16]


def test_the_form_is_chosen_by_size_and_format(make_matrix):
    def form(asked, device="cuda", dtype=mx.bfloat16, wide=False):
        return type(row_product.choose(asked, device, dtype, wide))

    large = RowProduct(1024, (Product(make_matrix(1024, 4096)),))
    assert form(large) is TensorCut
    assert form(large, "metal") is Cut
    assert form(large, dtype=mx.float32) is Cut
    assert form(large, wide=True) is Cut
    assert form(RowProduct(1024, (Product(make_matrix(1024, 512)),))) is Cut
    mixed = (*large.products, Product(make_matrix(1024, 512, ("affine", 6, 64))))
    assert form(RowProduct(1024, mixed)) is Cut


@pytest.mark.parametrize(
    ("width", "rows", "stored"),
    [
        (7168, (18432, 18432), "affine_4_g64"),
        (18432, (7168,), "affine_4_g64"),
        (7168, (129280,), "affine_4_g64"),
        (2880, (201088,), "plain"),
        (2048, (4096, 512, 512), "affine_8_g64"),
    ],
)
def test_public_sizes_are_taken_and_every_warp_has_work(width, rows, stored):
    mode, bits, group = FORMATS[stored]
    held = [Projection(mode, bits, group, r, width, "bfloat16") for r in rows]
    form = tensor_rows.Matrices(held, mx.bfloat16, exact=False, head=None)
    how = tensor_rows.chosen(form)
    assert how is not None
    assert how.split <= TileForm(held[0], form.halves).units
    assert how.warps * form.halves <= 64
    assert sum(-(-r // how.unit) for r in rows) >= 80
    assert np.log2(how.split) % 1 == 0


def test_few_short_rows_stay_a_warp_a_row():
    held = [Projection("affine", 4, 64, 2048, 4096, "bfloat16")]
    form = tensor_rows.Matrices(held, mx.bfloat16, exact=True, head=None)
    assert tensor_rows.takes(form)
    assert tensor_rows.chosen(form) is None
