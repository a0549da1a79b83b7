"""8-bit activations on the CPU: how far they are from the truth, what declines them, and who says so."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_experts import errors, load_model
from mlx_experts.engine.dispatch import policy
from mlx_experts.engine.dispatch.linear_dispatch import LinearDispatch
from mlx_experts.engine.dispatch.trace import linear_trace, trace
from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.kernels.cpu import experts, linear, native, stacks
from mlx_experts.engine.kernels.cpu.products import amx, int8
from mlx_experts.engine.kernels.request import Decline, Projection
from mlx_experts.engine.tools.bench_experts import relative_rms

KINDS = [("affine", 4, 64), ("affine", 4, 128), ("affine", 8, 64)]
NEAR = 1.2e-2  # of float32's sum; 8 bits of 64 values that share a scale are off by 0.7 %

needs_bytes = pytest.mark.skipif(
    not native.has("avx512vnni", "avx512bw", "avx512vl"), reason="the processor has no dot products of bytes"
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so that one that is not written is seen."""
    monkeypatch.setattr(stacks, "fresh", lambda shape: np.full(shape, np.nan, np.float32))


def layer(kind, outputs, inputs, dtype=mx.float32):
    mode, bits, group = kind
    mx.random.seed(0)
    made = nn.Linear(inputs, outputs, bias=True)
    made.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(made, group, bits, mode)


def distance(module, x):
    stack = expert_weights.read_dense(module)
    y = linear.prepare(stack, "int8")(x)
    wide = np.array(naive.dequantised(stack, 0)).astype(np.float64)
    wanted = np.array(x.astype(mx.float32)).astype(np.float64) @ wide.T + np.array(
        stack.bias.astype(mx.float32)
    )
    return np.linalg.norm(np.array(y.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)


@needs_bytes
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_products_are_as_near_as_eight_bits_allow(kind, dtype):
    module = layer(kind, 37, 768, dtype)
    for rows in (1, 2, 3, 8, 64, 90):
        x = mx.random.normal((rows, 768), key=mx.random.key(7)).astype(dtype)
        # Rounded inputs show; a wrong order or scale shows far more.
        assert 1e-4 < distance(module, x) < NEAR, rows


@needs_bytes
def test_whole_numbers_of_one_scale_are_exact():
    """An input of whole numbers up to 127 in each group is its own rounding."""
    module = layer(("affine", 4, 64), 37, 768)
    x = np.random.default_rng(0).integers(-127, 128, (9, 768)).astype(np.float32)
    x[:, ::64] = 127
    for rows in (1, 9):
        assert distance(module, mx.array(x[:rows])) < 1e-5


@needs_bytes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 5])
def test_what_is_no_number_is_not_hidden(value, rows):
    x = np.ones((rows, 128), np.float32)
    x[-1, 70] = value
    y = np.array(
        linear.prepare(expert_weights.read_dense(layer(("affine", 4, 64), 9, 128)), "int8")(mx.array(x))
    )
    assert np.isnan(y[-1]).all()
    assert np.isfinite(y[:-1]).all()


@needs_bytes
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_experts_are_as_near(container, stored, rows):
    packed = expert_weights.read(
        container(hidden=256, width=384, experts=6, stored=stored("affine", 4, 64), bias=True),
        activations.make("swiglu"),
    )
    mx.random.seed(5)
    x = mx.random.normal((1, rows, 256))
    indices, weights = mx.random.randint(0, 6, (1, rows, 2)), mx.random.uniform(shape=(1, rows, 2))
    y = experts.prepare(packed, mx.float32, "int8")(x, indices, weights)
    assert 1e-4 < relative_rms(y, naive.experts_in_float32(packed, x, indices, weights)) < 2 * NEAR


@pytest.mark.parametrize(
    ("projection", "rule"),
    [
        (Projection("affine", 3, 64, 8, 768, "float32"), "int8_format"),
        (Projection("mxfp4", 4, 32, 8, 768, "float32"), "int8_format"),
        (Projection("plain", 16, 0, 8, 768, "bfloat16"), "int8_format"),
        (Projection("affine", 4, 32, 8, 768, "float32"), "int8_width"),
        (Projection("affine", 4, 64, 8, 704, "float32"), "int8_width"),
    ],
)
def test_other_formats_keep_float32(projection, rule):
    assert int8.declines(projection).rule == rule


def test_an_older_processor_keeps_float32(monkeypatch):
    projection = Projection("affine", 4, 64, 8, 768, "float32")
    monkeypatch.setattr(native, "has", lambda *names: True)
    assert int8.declines(projection) is None
    monkeypatch.setattr(native, "has", lambda *names: False)
    assert int8.declines(projection).rule == "int8_processor"


@needs_bytes
@pytest.mark.parametrize(
    ("kind", "by"), [(("affine", 4, 64), "cpu int8"), (("affine", 3, 64), "cpu")], ids=str
)
def test_the_trace_says_what_activations_ran(kind, by):
    linear_trace.reset()
    module = layer(kind, 16, 256).eval()
    assert LinearDispatch("here", True, "int8")(module, mx.ones((1, 256))) is not None
    (row,) = linear_trace.table()
    assert row.reason == by
    assert ("int8_format" in row.note) == (by == "cpu")
    linear_trace.reset()


def test_the_environment_and_the_argument_choose(monkeypatch):
    assert policy.activations(None) == "float32"
    monkeypatch.setenv("MLX_EXPERTS_CPU_ACTIVATIONS", "int8")
    assert policy.activations(None) == "int8"
    assert policy.activations("float32") == "float32"
    monkeypatch.setenv("MLX_EXPERTS_CPU_ACTIVATIONS", "int4")
    with pytest.raises(errors.SettingError, match="MLX_EXPERTS_CPU_ACTIVATIONS"):
        policy.activations(None)


def test_a_load_with_other_activations_is_refused():
    with pytest.raises(errors.SettingError, match="float32 or int8"):
        load_model("api/demo", cpu_activations="int4")


@needs_bytes
def test_a_loaded_model_uses_them_everywhere():
    exact, _ = load_model("api/demo")
    rounded, _ = load_model("api/demo", cpu_activations="int8")
    tokens = mx.array([[3, 9, 4, 17, 5]])
    far = relative_rms(rounded(tokens), exact(tokens))
    assert 1e-4 < far < 0.2
    trace.reset()
    mx.eval(rounded(tokens))
    assert {row.reason for row in trace.table()} == {"cpu int8"}
    assert not amx.available() or stacks.plan(_first_stack(rounded), "int8").on_unit


def _first_stack(model):
    return expert_weights.read_dense(model.layers[0].self_attn.q_proj)


def test_inside_a_transformation_it_declines():
    run, said = linear.prepare(expert_weights.read_dense(layer(("affine", 4, 64), 8, 128)), "int8"), []

    def loss(x):
        said.append(run(x))
        return x.sum()

    mx.grad(loss)(mx.ones((2, 128)))
    assert isinstance(said[0], Decline)
