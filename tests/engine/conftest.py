"""Fixtures for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import activations


@dataclass(frozen=True)
class Stored:
    """How a projection is stored; bits 0 means plain."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    global_scale: bool = False

    def __str__(self) -> str:
        if not self.bits:
            return "plain"
        return f"{self.mode}{self.bits}g{self.group_size}{'+global' if self.global_scale else ''}"


@dataclass(frozen=True)
class Token:
    """One call's inputs."""

    x: mx.array
    indices: mx.array
    weights: mx.array

    def __iter__(self):
        return iter((self.x, self.indices, self.weights))


PLAIN = Stored("plain", 0, 0)


def _projection(experts: int, rows: int, cols: int, stored: Stored, dtype: mx.Dtype, bias: bool) -> nn.Module:
    module = SwitchLinear(cols, rows, experts, bias=bias)
    module.weight = (mx.random.normal((experts, rows, cols)) * cols**-0.5).astype(dtype)
    if bias:
        module.bias = (mx.random.normal((experts, rows)) * 0.2).astype(dtype)
    if not stored.bits:
        return module
    return module.to_quantized(stored.group_size, stored.bits, stored.mode, stored.global_scale)


def build_container(
    activation: str = "swiglu",
    hidden: int = 128,
    width: int = 192,
    experts: int = 6,
    stored: Stored = PLAIN,
    down: Stored | None = None,
    dtype: mx.Dtype = mx.float32,
    bias: bool = False,
    seed: int = 0,
) -> nn.Module:
    """An expert container of mlx-lm in evaluation mode, with real quantised weights."""
    mx.random.seed(seed)
    gated = activations.lookup(activation).gated
    container = (SwitchGLU if gated else SwitchMLP)(1, 1, 1)
    for name in ("gate_proj", "up_proj") if gated else ("fc1",):
        container[name] = _projection(experts, width, hidden, stored, dtype, bias)
    last = _projection(experts, hidden, width, down or stored, dtype, bias)
    container["down_proj" if gated else "fc2"] = last
    container.eval()
    mx.eval(container.parameters())
    return container


def make_token(
    hidden: int = 128,
    experts: int = 6,
    top_k: int = 2,
    dtype: mx.Dtype = mx.float32,
    rows: int = 1,
    seed: int = 1,
) -> Token:
    """Random inputs for ``rows`` rows."""
    mx.random.seed(seed)
    x = mx.random.normal((1, rows, hidden)).astype(dtype)
    picks = mx.argsort(mx.random.normal((1, rows, max(experts, top_k))), axis=-1)[..., :top_k] % experts
    weights = mx.softmax(mx.random.normal((1, rows, top_k)), axis=-1)
    return Token(x, picks.astype(mx.uint32), weights)


@pytest.fixture
def container() -> Callable[..., nn.Module]:
    """Builds expert containers: see ``build_container``."""
    return build_container


@pytest.fixture
def token() -> Callable[..., Token]:
    """Makes the inputs of a call: see ``make_token``."""
    return make_token


@pytest.fixture
def stored() -> type[Stored]:
    """Storage formats for ``container``."""
    return Stored


@pytest.fixture
def fresh_trace():
    """The trace, emptied before and after."""
    trace.reset()
    yield trace
    trace.reset()
