"""Every activation: the three forms agree with its definition, and names are a closed table."""

import ctypes
import math
import shutil
import subprocess
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels import activations
from mlx_experts.registry.errors import ConfigError, PluginError

CONSTANTS = {
    "swiglu_oai": (1.702, 7.0),
    "swiglu_clamp_before": (1.0, 3.0),
    "swiglu_clamp_after": (1.0, 2.5),
    "situ": (4.0, 6.0),
}
BOTH = [(n, *CONSTANTS.get(n, (1.0, 0.0))) for n in activations.names()]
BOTH += [(n, alpha, 0.0) for n, (alpha, _) in CONSTANTS.items()]


def _sigmoid(v):
    return 1 / (1 + np.exp(-v))


def _gelu(v):
    return 0.5 * v * (1 + np.vectorize(math.erf)(v / math.sqrt(2)))


def _gelu_tanh(v):
    return 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def _definition(name, g, u, alpha, limit):
    """The definitions, written once more and in float64."""
    bound = limit or np.inf
    match name:
        case "swiglu":
            return g * _sigmoid(g) * u
        case "swiglu_oai":
            g, u = np.minimum(g, bound), np.clip(u, -bound, bound)
            return g * _sigmoid(alpha * g) * (u + 1)
        case "swiglu_clamp_before":
            g, u = np.minimum(g, bound), np.clip(u, -bound, bound)
            return g * _sigmoid(g) * u
        case "swiglu_clamp_after":
            return np.minimum(g * _sigmoid(g), bound) * np.clip(u, -bound, bound)
        case "situ":
            return alpha * np.tanh(g / alpha) * _sigmoid(g) * (limit * np.tanh(u / limit) if limit else u)
        case "geglu":
            return _gelu(g) * u
        case "geglu_tanh":
            return _gelu_tanh(g) * u
        case "reglu":
            return np.maximum(g, 0) * u
        case "geglu_plus_one":
            return _gelu(g) * (u + 1)
        case "relu2":
            return np.maximum(u, 0) ** 2
        case "gelu":
            return _gelu(u)
        case "gelu_tanh":
            return _gelu_tanh(u)
        case "silu":
            return u * _sigmoid(u)
    raise AssertionError(f"{name} has no definition here")


def _inputs():
    rng = np.random.default_rng(0)
    return (rng.standard_normal(512) * 6).astype(np.float32), (rng.standard_normal(512) * 6).astype(
        np.float32
    )


@pytest.mark.parametrize(("name", "alpha", "limit"), BOTH)
def test_array_and_scalar_forms_follow_the_definition(name, alpha, limit):
    g, u = _inputs()
    wanted = _definition(name, g.astype(np.float64), u.astype(np.float64), alpha, limit)
    activation = activations.make(name, alpha, limit)
    entry = activations.lookup(name)
    array = np.array(activations.apply(activation, mx.array(g) if entry.gated else None, mx.array(u)))
    scalar = [entry.scalar(float(a), float(b), alpha, limit) for a, b in zip(g, u, strict=True)]
    np.testing.assert_allclose(array, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(scalar, wanted, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def c_forms(tmp_path_factory):
    """Every C expression, compiled into one library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("c")
    lines = ["#include <math.h>"]
    lines += [f"#define me_{f} {f}f" for f in ("exp", "tanh", "erf")]
    lines += ["#define me_min fminf", "#define me_max fmaxf"]
    for name in activations.names():
        body = activations.lookup(name).c
        lines.append(f"float {name}(float g, float u, float alpha, float limit) {{ return {body}; }}")
    (folder / "forms.c").write_text("\n".join(lines))
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", "forms.so", "forms.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "forms.so"))


@pytest.mark.parametrize(("name", "alpha", "limit"), BOTH)
def test_c_form_follows_the_definition(c_forms, name, alpha, limit):
    g, u = _inputs()
    function = getattr(c_forms, name)
    function.argtypes, function.restype = [ctypes.c_float] * 4, ctypes.c_float
    made = [function(float(a), float(b), alpha, limit) for a, b in zip(g, u, strict=True)]
    wanted = _definition(name, g.astype(np.float64), u.astype(np.float64), alpha, limit)
    np.testing.assert_allclose(made, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(name):
    g, u = (mx.array(v).astype(mx.bfloat16) for v in _inputs())
    gate = g if activations.lookup(name).gated else None
    made = activations.apply(activations.make(name), gate, u)
    wide = activations.apply(
        activations.make(name), None if gate is None else gate.astype(mx.float32), u.astype(mx.float32)
    )
    assert made.dtype == mx.bfloat16
    assert mx.array_equal(made, wide.astype(mx.bfloat16))


def test_a_large_negative_gate_gives_zero_and_no_nan():
    made = activations.apply(activations.make("swiglu"), mx.array([-200.0]), mx.array([3.0]))
    assert made.item() == 0.0


def test_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="geglu_tanh"):
        activations.lookup("swishglu")


def test_a_taken_name_is_refused_and_a_new_one_is_found(monkeypatch):
    monkeypatch.setattr(activations, "_TABLE", dict(activations._TABLE))
    with pytest.raises(PluginError, match="swiglu"):
        activations.register(activations.lookup("swiglu"))
    new = activations.ExpertActivation("identity", False, lambda g, u, alpha, limit: u)
    activations.register(new)
    assert activations.lookup("identity") is new
    assert mx.array_equal(
        activations.apply(activations.make("identity"), None, mx.array([2.0])), mx.array([2.0])
    )


def test_a_plugins_activation_that_two_threads_look_up_at_once_is_found_by_both(monkeypatch):
    monkeypatch.setattr(activations, "_TABLE", dict(activations._TABLE))
    product = activations.ExpertActivation("product", True, lambda g, u, a, b: g * u)

    def get(kind, name):
        activations._TABLE[name] = product  # what the other thread does
        return product

    offers = SimpleNamespace(names=lambda kind: {"product": "a plugin"}, get=get)
    monkeypatch.setattr(activations, "components", lambda: offers)
    assert activations.lookup("product") is product
