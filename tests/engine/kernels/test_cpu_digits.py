"""Inputs in float32 as whole numbers on the CPU: as near to the truth as products in float32."""

import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.kernels.cpu import experts, linear, native, stacks
from mlx_experts.engine.kernels.cpu.products import byte_rows, digits
from mlx_experts.engine.kernels.cpu.products.rows import blocks_of
from mlx_experts.engine.kernels.request import Projection
from mlx_experts.engine.tools.bench_experts import relative_rms

needs_bytes = pytest.mark.skipif(
    not native.has(*byte_rows.NEEDED), reason="the processor has no dot products of bytes"
)
KINDS = [
    ("affine", 4, 32),
    ("affine", 4, 64),
    ("affine", 4, 128),
    ("affine", 2, 32),
    ("affine", 2, 128),
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so that one that is not written is seen."""
    monkeypatch.setattr(stacks, "fresh", lambda shape: np.full(shape, np.nan, np.float32))


def matrix(kind, rows, width, dtype=mx.float32):
    """A quantised matrix, and what it stands for as float64."""
    mode, bits, group = kind
    wide = mx.random.normal((rows, width), key=mx.random.key(rows * width)) * 0.05
    weight, scales, *biases = mx.quantize(wide, group, bits, mode)
    if biases:
        scales, biases = scales.astype(dtype), [biases[0].astype(dtype)]
    mx.eval(weight, scales, *biases)
    held = expert_weights.dtype_name(scales.dtype)
    arrays = [a[None] for a in (weight, scales, *biases)]
    mx.eval(arrays)
    stack = expert_weights.Stack(Projection(mode, bits, group, rows, width, held), *arrays)
    return stack, np.array(naive.dequantised(stack, 0).astype(mx.float32)).astype(np.float64)


def distance(stack, wide, x):
    run = linear.prepare(stack)
    # One at a time: several go through the matrix unit where there is one.
    rows = [np.array(run(mx.array(row[None])).astype(mx.float32)) for row in x]
    y = np.concatenate(rows).astype(np.float64)
    wanted = x.astype(np.float64) @ wide.T
    return np.linalg.norm(y - wanted) / np.linalg.norm(wanted)


@needs_bytes
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("width", [256, 640, 1152, 2880])
def test_products_are_as_near_as_those_in_float32(kind, width, monkeypatch):
    width -= width % kind[2]
    random = np.random.default_rng(width)
    usual = random.standard_normal((3, width)).astype(np.float32)
    uneven = (usual * np.exp(4 * random.standard_normal((3, width)))).astype(np.float32)
    for rows, dtype in ((37, mx.float32), (4, mx.bfloat16), (3, mx.float16)):
        stack, wide = matrix(kind, rows, width, dtype)
        assert digits.takes(stack.projection)
        for x in (usual, uneven, uneven[:1] * np.float32(1e-30), usual[:1] * np.float32(1e30)):
            assert distance(stack, wide, x) < 1e-6
    monkeypatch.setattr(digits, "takes", lambda projection: False)
    assert distance(stack, wide, usual) < 1e-6  # other processors' form


@needs_bytes
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_experts_are_as_near(kind, container, stored):
    packed = expert_weights.read(
        container(hidden=256, width=384, experts=6, stored=stored(*kind), bias=True),
        activations.make("swiglu"),
    )
    assert all(digits.takes(stack.projection) for stack in packed.stacks())
    mx.random.seed(5)
    x = mx.random.normal((1, 1, 256))
    indices, weights = mx.random.randint(0, 6, (1, 1, 2)), mx.random.uniform(shape=(1, 1, 2))
    y = experts.prepare(packed, mx.float32)(x, indices, weights)
    assert relative_rms(y, naive.experts_in_float32(packed, x, indices, weights)) < 1e-6


@needs_bytes
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_code_meets_its_own_input(kind):
    """An input that is one at a single place and zero elsewhere reads that weight."""
    stack, wide = matrix(kind, 2, 320 if kind[2] != 128 else 640)
    width = wide.shape[1]
    run = linear.prepare(stack)
    for place, one in enumerate(np.eye(width, dtype=np.float32)):
        np.testing.assert_allclose(np.array(run(mx.array(one[None])))[0], wide[:, place], rtol=0, atol=2e-8)


@needs_bytes
def test_whole_numbers_are_exact():
    """Inputs of up to 22 bits, the largest with either sign, a scale of one and a bias of zero."""
    stack, _ = matrix(("affine", 4, 64), 5, 256)
    ones = mx.ones_like(stack.scales)
    stack = expert_weights.Stack(stack.projection, stack.weight, ones, mx.zeros_like(ones))
    mx.eval(stack.arrays())
    codes = np.array(naive.dequantised(stack, 0)).astype(np.int64)
    for seed in range(4):
        x = np.zeros((1, 256), np.int64)
        random = np.random.default_rng(seed)
        x[0, random.permutation(256)[:2]] = random.integers(-(1 << 19), 1 << 19, 2)
        y = np.array(linear.prepare(stack)(mx.array(x.astype(np.float32))))
        assert (y == x @ codes.T).all()


@needs_bytes
@pytest.mark.parametrize("kind", [("affine", 4, 64), ("affine", 2, 64), ("mxfp4", 4, 32)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_hidden(kind, value):
    x = np.ones((3, 256), np.float32)
    x[-1, 70] = value
    run = linear.prepare(matrix(kind, 9, 256)[0])
    assert np.isnan(np.array(run(mx.array(x[-1:])))).all()
    assert np.isfinite(np.array(run(mx.array(x[:1])))).all()


@needs_bytes
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 2.0**-104, 1e35])
def test_the_smallest_and_the_largest_inputs_are_finite(value):
    stack, wide = matrix(("mxfp4", 4, 32), 4, 256)
    x = np.full((1, 256), value, np.float32)
    y = np.array(linear.prepare(stack)(mx.array(x)), np.float64)
    # A word's inputs are kept to 2**-126: what is smaller counts as zero, as in a processor that drops
    # subnormal numbers.
    np.testing.assert_allclose(y, x.astype(np.float64) @ wide.T, rtol=1e-5, atol=1e-36)


@needs_bytes
@pytest.mark.parametrize("kind", [("affine", 4, 64), ("nvfp4", 4, 16)], ids=str)
def test_nothing_behind_a_row_is_read(kind):
    """Behind the row lie scales, factors and sums that are no numbers."""
    stack, wide = matrix(kind, 1, 320)
    p, words = stack.projection, 320 // 8
    quantise, product = stacks.digits_functions(stacks.kind_of(p), True)

    def behind(array, poison=0xFF):
        some = np.frombuffer(memoryview(array).cast("B"), np.uint8)
        return np.concatenate([some, np.full(256, poison, np.uint8)])

    weight, scales = behind(stack.weight), behind(stack.scales)
    biases = behind(stack.scales if stack.biases is None else stack.biases)
    x = np.random.default_rng(0).standard_normal(320).astype(np.float32)
    room, sums = np.full(4 * 512, 0xFF, np.uint8), np.full(4 * words, np.nan, np.float32)
    quantise.ctypes(x.ctypes.data, 0, 320, room.ctypes.data, sums.ctypes.data, words)
    assert np.isnan(sums[2 * words :]).all()
    out = np.full(2, np.nan, np.float32)
    arrays = (weight.ctypes.data, scales.ctypes.data, biases.ctypes.data)
    product.ctypes(*arrays, 0, 0, 1, room.ctypes.data, sums.ctypes.data, words, out.ctypes.data)
    np.testing.assert_allclose(out[0], x @ wide[0], rtol=1e-5)
    assert np.isnan(out[1])


@pytest.mark.parametrize(
    ("projection", "taken"),
    [
        (Projection("affine", 4, 64, 8, 768, "float32"), True),
        (Projection("affine", 4, 64, 8, 64, "float32"), False),  # no room for a whole line
        (Projection("affine", 3, 64, 8, 768, "float32"), False),
        (Projection("affine", 8, 64, 8, 768, "float32"), False),
        (Projection("mxfp4", 4, 32, 8, 2880, "uint8"), True),
        (Projection("mxfp8", 8, 32, 8, 2880, "uint8"), False),
        (Projection("plain", 16, 0, 8, 768, "bfloat16"), False),
    ],
    ids=str,
)
def test_which_matrices_are_taken(projection, taken, monkeypatch):
    monkeypatch.setattr(native, "has", lambda *names: True)
    assert digits.takes(projection) is taken
    monkeypatch.setattr(native, "has", lambda *names: False)
    assert not digits.takes(projection)


MISTAKES = {
    "the order of digits": (digits, "in reversed(range(DIGITS))", "in range(DIGITS)"),
    "the order of pieces": (digits, "pieces * byte + piece)", "4 * piece + byte)"),
    "the sign of a digit": (
        digits,
        "lanes.whole(_ZERO)), lanes.whole(_ZERO))",
        "lanes.whole(0)), lanes.whole(0))",
    ),
    "room for the largest": (digits, "_ROOM = 1.005", "_ROOM = 0.5"),
    "half of doubled codes": (digits, "F32(0.5)", "F32(1.0)"),
    "the weight of a digit": (byte_rows, "shifted_left(sum_, 8)", "shifted_left(sum_, 7)"),
    "raised codes": (byte_rows, "sum_ = builder.add(sum_, totals)", "pass"),
    "the bias": (byte_rows, "builder.mul(at, scale_bytes)", "builder.mul(row, scale_bytes)"),
    "what is left of a row": (byte_rows, "if tail:", "if False:"),
    "rows left over": (byte_rows, "builder.sub(count, done)", "builder.sub(done, done)"),
}


@needs_bytes
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name, monkeypatch):
    module, right, wrong = MISTAKES[name]
    text = Path(module.__file__).read_text()
    assert text.count(right) == 1
    mutant = ModuleType(f"{module.__name__}_mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(right, wrong), "<mutant>", "exec"), mutant.__dict__)
    if module is byte_rows:
        monkeypatch.setattr(digits, "byte_rows", mutant)
        mutant.NEEDED = byte_rows.NEEDED
    parts = digits if module is byte_rows else mutant
    functions = lambda kind, tail: (parts.quantise(kind), parts.rows_product(kind, tail))  # noqa: E731
    monkeypatch.setattr(stacks, "digits_functions", functions)
    kind = ("mxfp4", 4, 32) if name in ("half of doubled codes", "raised codes") else ("affine", 4, 64)
    stack, wide = matrix(kind, 7, 320)
    assert blocks_of(stack.projection).weights == 8
    x = np.random.default_rng(1).standard_normal((2, 320)).astype(np.float32)
    assert not distance(stack, wide, x) < 1e-5
