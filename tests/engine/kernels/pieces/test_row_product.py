"""The row product's text for CUDA and Metal, run on the CPU against float64."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels.gpu.pieces import row_product, truth
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Norm, Product, RowProduct, Turn
from mlx_experts.engine.kernels.request import Decline

LIMITS = {mx.bfloat16: 3e-3, mx.float16: 1e-3, mx.float32: 2e-6}
KINDS = ("cuda", "metal")
FORMATS = {
    "affine_4_g64": ("affine", 4, 64),
    "affine_4_g32": ("affine", 4, 32),
    "affine_8_g128": ("affine", 8, 128),
    "affine_3_g32": ("affine", 3, 32),
    "affine_6_g64": ("affine", 6, 64),
    "mxfp4": ("mxfp4", 4, 32),
    "mxfp8": ("mxfp8", 8, 32),
    "nvfp4": ("nvfp4", 4, 16),
    "plain": ("plain", 16, 0),
}


def weight(size: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """A norm's weight."""
    return (1.0 + 0.3 * mx.random.normal((size,))).astype(dtype)


def frequencies(dims: int, theta: float = 10000.0) -> mx.array:
    """The plain frequencies of a rotation."""
    return 1.0 / theta ** (mx.arange(0, dims, 2) / dims)


def run(kind, asked, on_host, dtype=mx.bfloat16, change=lambda t: t, join=True, **others):
    """Distance of every output to the truth, by name."""
    assert row_product.check(asked) is None
    piece = row_product.build(asked, row_product.backend_of(kind), kind, dtype, join=join)
    shaped = {"x": asked.width, "branch": asked.width, "residual": asked.products[0].rows}
    shaped["gate"] = asked.width // asked.gate_width
    token = {n: mx.random.normal((1, 1, s)).astype(dtype) for n, s in shaped.items()}
    token |= {"offset": mx.array([4321] * 4, dtype=mx.int32)} | others
    token = {name: token[name] for name in piece.tokens}
    want = truth.row_product(asked, token)
    got = on_host(kind, piece, token, change)
    assert set(got) == set(want)
    return {name: truth.distance(got[name], want[name]) for name in want}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [list(FORMATS)[:5], list(FORMATS)[5:]], ids=["affine", "others"])
def test_formats_in_one_launch(names, kind, make_matrix, on_host):
    mx.random.seed(1)
    products = tuple(Product(make_matrix(256, 24, FORMATS[n], bias=n != "mxfp4")) for n in names)
    for name, far in run(kind, RowProduct(256, products, Norm(weight(256), 1e-5)), on_host).items():
        assert far < LIMITS[mx.bfloat16], names[int(name[1:])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
def test_dtypes_and_a_mixture_of_formats(dtype, kind, make_matrix, on_host):
    mx.random.seed(2)
    stacks = [
        make_matrix(384, rows, stored, dtype=dtype)
        for rows, stored in zip((40, 8, 16), list(FORMATS.values())[:3], strict=True)
    ]
    stacks += [make_matrix(384, 9, ("plain", 16, 0), dtype=dtype)]
    asked = RowProduct(384, tuple(map(Product, stacks)), Norm(weight(384, dtype), 1e-6, offset=1.0))
    for name, far in run(kind, asked, on_host, dtype).items():
        assert far < LIMITS[dtype], name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [96, 4096 + 320])
def test_widths_that_leave_lanes_idle_and_rows_that_do_not_fit_at_once(width, kind, make_matrix, on_host):
    mx.random.seed(3)
    asked = RowProduct(width, (Product(make_matrix(width, 20, ("affine", 4, 32))),), Norm(None, 1e-6))
    assert run(kind, asked, on_host)["y0"] < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("d", "dims", "first", "interleaved", "late", "offset"),
    [
        (64, 64, 0, False, False, 0.0),
        (128, 32, 48, True, False, 1.0),
        (80, 80, 0, False, True, 0.0),
        (192, 64, 128, True, True, 0.0),
        (96, 32, 64, False, True, 0.0),
    ],
)
def test_heads_are_normalised_and_turned(
    d, dims, first, interleaved, late, offset, kind, make_matrix, on_host
):
    mx.random.seed(4)
    turn = Turn(frequencies(dims), dims, interleaved, factor=1.2, first=first)
    heads = [Heads(d, Norm(weight(d), 1e-6, offset), turn, late) for _ in range(2)]
    products = (
        Product(make_matrix(128, 3 * d, bias=True), heads[0], clip=1.5),
        Product(make_matrix(128, 2 * d), heads[1]),
        Product(make_matrix(128, 40)),
    )
    asked = RowProduct(128, products, Norm(weight(128), 1e-6))
    for name, far in run(kind, asked, on_host, join=late).items():
        assert far < LIMITS[mx.bfloat16], name


@pytest.mark.parametrize("kind", KINDS)
def test_heads_without_norm_or_without_rotation_and_frequencies_by_call(kind, make_matrix, on_host):
    mx.random.seed(5)
    products = (
        Product(make_matrix(64, 256), Heads(64, turn=Turn(None, 64))),
        Product(make_matrix(64, 64), Heads(64, Norm(None, 1e-5))),
    )
    for name, far in run(kind, RowProduct(64, products), on_host, inverse=frequencies(64, 500.0)).items():
        assert far < LIMITS[mx.bfloat16], name


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_packed_with_the_queries_comes_out_apart(kind, make_matrix, on_host):
    mx.random.seed(6)
    heads = Heads(64, Norm(weight(64), 1e-6, 1.0), Turn(frequencies(16), 16))
    products = (
        Product(make_matrix(128, 3 * 128, bias=True), heads, packed=True),
        Product(make_matrix(128, 64)),
    )
    distances = run(kind, RowProduct(128, products, Norm(weight(128), 1e-6)), on_host)
    assert set(distances) == {"y0", "g0", "y1"}
    assert all(far < LIMITS[mx.bfloat16] for far in distances.values()), distances


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gate", "gate_width"), [(None, 1), ("sigmoid", 1), ("softplus", 64)])
def test_gate_and_residual(gate, gate_width, kind, make_matrix, on_host):
    mx.random.seed(7)
    product = Product(make_matrix(256, 72, bias=True))
    asked = RowProduct(256, (product,), gate=gate, gate_width=gate_width, residual=True, multiplier=0.22)
    assert run(kind, asked, on_host)["y0"] < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_two_rows_is_normalised_and_comes_out(kind, make_matrix, on_host):
    mx.random.seed(8)
    asked = RowProduct(4160, (Product(make_matrix(4160, 16)),), Norm(weight(4160), 1e-6), added=0.5)
    distances = run(kind, asked, on_host)
    assert set(distances) == {"y0", "stream"}
    assert all(far < LIMITS[mx.bfloat16] for far in distances.values()), distances


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_joined_matrix(kind, make_matrix, on_host):
    mx.random.seed(9)
    joined = make_matrix(128, 128 + 64 + 32, bias=True)
    parts = [row_product.stack_part(joined, first, rows) for first, rows in ((0, 128), (128, 64), (192, 32))]
    heads = Heads(64, turn=Turn(frequencies(64), 64))
    products = (Product(parts[0], heads), Product(parts[1], heads), Product(parts[2]))
    for name, far in run(kind, RowProduct(128, products), on_host).items():
        assert far < LIMITS[mx.bfloat16], name


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_that_are_joined_compute_what_they_did(kind, make_matrix, on_host):
    mx.random.seed(12)
    stacks = [make_matrix(128, rows, bias=rows == 48) for rows in (64, 48, 16)]
    parts = row_product.joined(stacks)
    assert parts is not None
    whole = RowProduct(128, tuple(map(Product, parts)))
    apart = RowProduct(128, tuple(map(Product, stacks)))
    x = mx.random.normal((1, 1, 128)).astype(mx.bfloat16)
    wanted = truth.row_product(apart, {"x": x})
    piece = row_product.build(whole, row_product.backend_of(kind), kind, mx.bfloat16, join=True)
    assert len(piece.held) == 5
    got = on_host(kind, piece, {"x": x})
    for name, want in wanted.items():
        assert truth.distance(got[name], want) < LIMITS[mx.bfloat16], name
    assert row_product.joined([stacks[0], make_matrix(128, 16, FORMATS["mxfp4"])]) is None


MISTAKES = {
    "the norm's factor is left out": ("sum * factor", "sum"),
    "a segment is skipped": ("begin += ME_SEGMENT", "begin += 2 * ME_SEGMENT"),
    "a row too few": ("lane < ME_ROWS &&", "lane < ME_ROWS - 1 &&"),
    "the pair's sign": ("second ? across : -across", "second ? -across : across"),
    "another head's place": ("at % half_way", "at % (half_way / 2)"),
    "the norm's weight is left out": ("v[j] *= scale[j]", "v[j] *= 1.0f"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed(name, make_matrix, on_host):
    (right, wrong), kind = MISTAKES[name], KINDS[list(MISTAKES).index(name) % 2]
    mx.random.seed(10)
    heads = Heads(64, Norm(weight(64), 1e-6), Turn(frequencies(64), 64))
    products = (Product(make_matrix(4160, 64), heads), Product(make_matrix(4160, 21)))
    asked = RowProduct(4160, products, Norm(weight(4160), 1e-6))

    def change(text):
        assert right in text
        return text.replace(right, wrong)

    distances = run(kind, asked, on_host, change=change)
    assert not all(far < LIMITS[mx.bfloat16] for far in distances.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_barrier_is_noticed(kind, make_matrix, on_host):
    mx.random.seed(11)
    asked = RowProduct(256, (Product(make_matrix(256, 16)),))

    def change(text):
        assert "me_barrier();\nif (tile <" in text
        return text.replace("me_barrier();\nif (tile <", "if (tile <")

    assert not run(kind, asked, on_host, change=change)["y0"] < LIMITS[mx.bfloat16]


def test_what_cannot_be_cut_evenly_is_declined(make_matrix):
    odd = row_product.check(RowProduct(40, (Product(make_matrix(40, 8, ("plain", 16, 0))),)))
    assert isinstance(odd, Decline)
    assert odd.rule == "width"
    heads = Heads(72, turn=Turn(frequencies(64), 64))
    narrow = row_product.check(RowProduct(64, (Product(make_matrix(64, 144), heads),)))
    assert isinstance(narrow, Decline)
    assert narrow.rule == "head_width"
    whole = Heads(64, Norm(None, 1e-6), whole=True)
    spanning = row_product.check(RowProduct(64, (Product(make_matrix(64, 128), whole),)))
    assert isinstance(spanning, Decline)
    assert spanning.rule == "whole"


def test_an_even_product_is_accepted(make_matrix):
    heads = Heads(64, Norm(weight(64), 1e-6), Turn(frequencies(64), 64))
    assert row_product.check(RowProduct(64, (Product(make_matrix(64, 128), heads),))) is None
