"""The pieces on an NVIDIA GPU against float64: ``pytest -m cuda``."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from mlx_experts.engine.kernels.expert_weights import read_stack
from mlx_experts.engine.kernels.gpu.pieces import (
    delta_step,
    head_product,
    head_turns,
    routing,
    row_product,
    truth,
)
from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.kernels.gpu.pieces.head_product import HeadProduct
from mlx_experts.engine.kernels.gpu.pieces.packed import viewed
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Norm, Product, RowProduct, Turn
from mlx_experts.engine.kernels.gpu.pieces.tensor_rows import TensorCut
from mlx_experts.engine.kernels.router_kernel import RouterSteps

pytestmark = pytest.mark.cuda

LIMITS = {mx.bfloat16: 3e-3, mx.float16: 1e-3, mx.float32: 5e-6}
FORMATS = [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("plain", 16, 0),
]


def weight(size, dtype=mx.bfloat16):
    """A norm's weight."""
    return (1.0 + 0.3 * mx.random.normal((size,))).astype(dtype)


def frequencies(dims):
    """The plain frequencies of a rotation."""
    return 1.0 / 1e6 ** (mx.arange(0, dims, 2) / dims)


def run(piece, **token):
    """Outputs by name from poisoned memory, the same twice."""
    piece.options["init_value"] = float("nan")
    arrays = [token[name] for name in piece.tokens]
    first, again = ([np.array(o.astype(mx.float32)) for o in piece(*arrays)] for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    return dict(zip(piece.outputs, first, strict=True))


def check(asked, dtype=mx.bfloat16, how=None):
    """Every output of a row product close to truth."""
    assert row_product.check(asked) is None
    piece = row_product.build(asked, row_product.backend_of("cuda"), "cuda", dtype, how=how)
    sizes = {"x": asked.width, "branch": asked.width, "residual": asked.products[0].rows}
    sizes["gate"] = asked.width // asked.gate_width
    token = {name: mx.random.normal((1, 1, size)).astype(dtype) for name, size in sizes.items()}
    token["offset"] = mx.array([30011] * 4, dtype=mx.int32)
    got, want = run(piece, **token), truth.row_product(asked, token)
    for name in want:
        assert truth.distance(got[name], want[name]) < LIMITS[dtype], name


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_formats(stored, dtype, make_matrix):
    mx.random.seed(1)
    products = tuple(
        Product(make_matrix(640, rows, stored, bias=rows == 33, dtype=dtype)) for rows in (128, 33)
    )
    check(RowProduct(640, products, Norm(weight(640, dtype), 1e-6)), dtype)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_formats_on_tensor_cores(stored, dtype, make_matrix):
    """Rows that do not fill their tiles, and a last step that is short."""
    mx.random.seed(1)
    products = tuple(
        Product(make_matrix(2944, rows, stored, bias=rows == 33, dtype=dtype)) for rows in (128, 33)
    )
    asked = RowProduct(2944, products, Norm(weight(2944, dtype), 1e-6), added=1.0)
    for how in (TensorCut(1, 4), TensorCut(4, 2, words=32)):
        check(asked, dtype, how)


@pytest.mark.parametrize("stored", [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", 4, 32), ("plain", 16, 0)])
@pytest.mark.parametrize(
    ("width", "rows"), [(2048, 5120), (4096, 2048), (2880, 4096), (7168, 1536), (16384, 7168)]
)
def test_public_widths(width, rows, stored, make_matrix):
    mx.random.seed(2)
    check(
        RowProduct(width, (Product(make_matrix(width, rows, stored)),), Norm(weight(width), 1e-6), added=1.0)
    )


@pytest.mark.parametrize(("d", "dims", "interleaved"), [(128, 128, False), (64, 64, False), (256, 64, True)])
@pytest.mark.parametrize("late", [False, True])
def test_turned_heads(d, dims, interleaved, late, make_matrix):
    mx.random.seed(3)
    heads = Heads(d, Norm(weight(d), 1e-6), Turn(frequencies(dims), dims, interleaved), late)
    products = tuple(Product(make_matrix(2048, n * d), h) for n, h in ((32, heads), (4, heads), (4, None)))
    check(RowProduct(2048, products, Norm(weight(2048), 1e-6)))


def test_packed_gate_and_what_it_opens(make_matrix):
    mx.random.seed(4)
    heads = Heads(256, Norm(weight(256), 1e-6, 1.0), Turn(frequencies(64), 64))
    packed = Product(make_matrix(2048, 16 * 512), heads, packed=True)
    check(RowProduct(2048, (packed, Product(make_matrix(2048, 512), heads)), Norm(weight(2048), 1e-6, 1.0)))
    check(
        RowProduct(4096, (Product(make_matrix(4096, 2048)),), gate="sigmoid", residual=True, multiplier=0.3)
    )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_launch_reads_what_the_one_before_left(dtype, make_matrix):
    """A gate, a residual, and two parts of one row."""
    mx.random.seed(5)
    products = tuple(Product(make_matrix(2048, rows, dtype=dtype)) for rows in (520, 4096))
    asked = RowProduct(2048, products, Norm(weight(2048, dtype), 1e-6), added=1.0)
    first = row_product.build(asked, row_product.backend_of("cuda"), "cuda", dtype)
    x, branch = (mx.random.normal((1, 1, 2048)).astype(dtype) for _ in range(2))
    left = first.left(x, branch)
    output = RowProduct(4096, (Product(make_matrix(4096, 2048, dtype=dtype)),), gate="sigmoid", residual=True)
    second = row_product.build(output, row_product.backend_of("cuda"), "cuda", dtype)
    given = {
        "x": mx.random.normal((1, 1, 4096)).astype(dtype),
        "gate": left["y1"],
        "residual": left["stream"],
    }
    views = {name: viewed(value) for name, value in given.items()}
    want = truth.row_product(output, views)["y0"]
    assert truth.distance(run(second, **given)["y0"], want) < LIMITS[dtype]
    rows = {"l": (Heads(512, Norm(weight(512, dtype), 1e-6)), 512), "kr": (Heads(8), 8)}
    turns = head_turns.build(rows, row_product.backend_of("cuda"), "cuda", dtype)
    parts = {"l": left["y0"].part(0, 512), "kr": left["y0"].part(512, 8)}
    got = run(turns, **parts)
    for name, (heads, _) in rows.items():
        want = truth.each_head(truth.wide(viewed(parts[name])).reshape(-1), heads)
        assert truth.distance(got[f"out_{name}"], want) < LIMITS[dtype], name


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("stored", [(64, 4, "affine"), (32, 8, "affine"), (32, 4, "mxfp4"), None], ids=str)
@pytest.mark.parametrize(("width", "rows", "pitch"), [(128, 512, 192), (512, 128, 512)])
def test_a_matrix_of_each_head(width, rows, pitch, stored, dtype):
    mx.random.seed(6)
    layer = MultiLinear(width, rows, 128)
    layer.set_dtype(dtype)
    stack = read_stack(
        layer if stored is None else layer.to_quantized(*stored), MultiLinear, QuantizedMultiLinear
    )
    asked = HeadProduct(stack, pitch)
    assert head_product.check(asked) is None
    piece = head_product.build(asked, row_product.backend_of("cuda"), "cuda", dtype)
    x = mx.random.normal((1, 128, 1, pitch)).astype(dtype)
    assert truth.distance(run(piece, x=x)["y"], truth.head_product(asked, x)) < LIMITS[dtype]


@pytest.mark.parametrize("first", [0, 64, 128])
def test_the_rotated_part_of_a_head_may_begin_anywhere(first, make_matrix):
    mx.random.seed(8)
    heads = Heads(192, turn=Turn(frequencies(64), 64, True, first=first))
    check(RowProduct(1536, (Product(make_matrix(1536, 24 * 192), heads, 192),), Norm(weight(1536), 1e-6)))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("by_key_head", [True, False])
@pytest.mark.parametrize(
    ("keys", "values", "dk", "dv"), [(16, 32, 128, 128), (4, 12, 64, 96), (2, 2, 256, 256)]
)
def test_a_gated_delta_nets_token(keys, values, dk, dv, by_key_head, dtype):
    mx.random.seed(9)
    channels = 2 * keys * dk + values * dv
    step = DeltaStep(
        key_heads=keys,
        value_heads=values,
        key_dim=dk,
        value_dim=dv,
        kernel=4,
        by_key_head=by_key_head,
        gate="silu" if by_key_head else "sigmoid",
        eps=1e-6,
        conv=mx.random.normal((channels, 4, 1)).astype(dtype),
        decay=mx.random.normal((values,)),
        shift=mx.random.normal((values,)).astype(dtype),
        norm=weight(dv, dtype),
    )
    assert delta_step.check(step) is None
    piece = delta_step.build(step, row_product.backend_of("cuda"), "cuda", dtype, join=True)
    widths = [channels + values * dv, 2 * values]
    if not by_key_head:
        widths = [channels, values * dv, values, values]
    token = {f"r{i}": mx.random.normal((1, 1, width)).astype(dtype) for i, width in enumerate(widths)}
    token["past"] = mx.random.normal((1, 3, channels)).astype(dtype)
    token["memory"] = mx.random.normal((1, values, dv, dk))
    got, want = run(piece, **token), truth.delta_step(step, token)
    for name in want:
        assert truth.distance(got[name], want[name]) < (5e-6 if name == "new_memory" else LIMITS[dtype]), name


def test_norm_over_all_heads():
    mx.random.seed(5)
    turn = Turn(frequencies(128), 128)
    rows = {n: (Heads(128, Norm(weight(2048), 1e-6), turn, whole=True), 2048) for n in ("q", "k")}
    piece = head_turns.build(rows, row_product.backend_of("cuda"), "cuda", mx.bfloat16)
    token = {n: mx.random.normal((1, 1, 2048)).astype(mx.bfloat16) for n in rows}
    got = run(piece, offset=mx.array([77] * 4, dtype=mx.int32), **token)
    for name, (heads, _) in rows.items():
        want = truth.each_head(truth.wide(token[name]).reshape(-1), heads, 77, np.array(turn.inverse))
        assert truth.distance(got[f"out_{name}"], want) < LIMITS[mx.bfloat16]


@pytest.mark.parametrize(
    ("width", "experts", "top_k"), [(2048, 128, 8), (4096, 8, 2), (2048, 512, 10), (7168, 256, 8)]
)
def test_the_last_block_selects_every_time(width, experts, top_k, make_matrix):
    mx.random.seed(6)
    matrix, norm = make_matrix(width, experts, ("affine", 8, 64)), Norm(weight(width), 1e-6)
    steps = RouterSteps(experts, top_k, normalise="sum")
    piece = routing.build(matrix, norm, steps, row_product.backend_of("cuda"), mx.bfloat16)
    asked = RowProduct(width, (Product(matrix),), norm)
    rows = [mx.random.normal((1, 1, width)).astype(mx.bfloat16) for _ in range(50)]
    calls = [piece(x, routing.zeros(x)) for x in rows]
    # All of them at once: MLX runs side by side what does not wait for each other.
    mx.eval(calls)
    for x, got in zip(rows, calls, strict=True):
        logits = truth.row_product(asked, {"x": x})["y0"]
        made = dict(zip(piece.outputs, got, strict=True))
        assert truth.distance(np.array(made["y0"]), logits) < 1e-5
        # The float32 logits decide: a tie of the truth's may fall either way.
        logits = np.array(made["y0"]).reshape(-1).astype(np.float64)
        chosen = np.argsort(-logits, kind="stable")[:top_k]
        assert np.array(made["chosen"]).reshape(-1)[:top_k].tolist() == chosen.tolist()
        scores = np.exp(logits[chosen] - logits[chosen].max())
        share = np.array(made["share"]).reshape(-1)[:top_k]
        assert truth.distance(share, scores / scores.sum()) < 1e-5


@pytest.mark.parametrize(
    ("right", "wrong"), [("sum * factor", "sum"), ("c * chunk < ME_H", "c * chunk + 32 < ME_H")]
)
def test_a_planted_mistake_is_noticed(right, wrong, make_matrix):
    mx.random.seed(7)
    asked = RowProduct(640, (Product(make_matrix(640, 64)),), Norm(weight(640), 1e-6))
    piece = row_product.build(asked, row_product.backend_of("cuda"), "cuda", mx.bfloat16)
    launch = piece.launch
    assert right in launch.header + launch.source
    header, source = launch.header.replace(right, wrong), launch.source.replace(right, wrong)
    piece.launch = type(launch)(**{**launch.__dict__, "header": header, "source": source})
    token = {"x": mx.random.normal((1, 1, 640)).astype(mx.bfloat16)}
    got = np.array(piece(token["x"])[0].astype(mx.float32))
    assert not truth.distance(got, truth.row_product(asked, token)["y0"]) < LIMITS[mx.bfloat16]
