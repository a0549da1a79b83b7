"""What is tried on a device: every kernel on every kind of input, and what of it is timed.

A combination is plain data, so that another process can run it. Running it compiles all that its times need;
they are taken later, when no other process compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch, current_device
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.tools import bench_experts
from mlx_experts.engine.tools.bench_experts import Storage
from mlx_experts.engine.tools.device import pieces
from mlx_experts.engine.tools.device.report import Timed, Trial

# Each with every activation dtype.
_FORMATS = (
    Storage("affine", 4, 64),
    Storage("affine", 8, 64),
    Storage("affine", 6, 64),
    Storage("affine", 3, 32),
    Storage("mxfp4", 4, 32),
    Storage("mxfp8", 8, 32),
    Storage("nvfp4", 4, 16),
    Storage("plain", 0, 0),
)
_BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
_WIDTH, _EXPERT_WIDTH, _EXPERTS, _TOP_K = 256, 128, 8, 4
# What is timed: experts of qwen3_moe's widths, few enough that making them takes no time.
_TIMED = (Storage("affine", 4, 64), Storage("affine", 8, 64), Storage("mxfp4", 4, 32))
_HIDDEN, _WIDE, _HELD, _PICKED = 2048, 768, 24, 8
_ROUNDS, _CALLS = 9, 8
# The fewest rounds that a comparison takes.
_REHEARSED = 2


class Ran(NamedTuple):
    """What a combination has given so far.

    Args:
        trial: None where only times are wanted.
        time: takes the times, for which nothing is compiled any more; None where none are wanted.
    """

    trial: Trial | None
    time: Callable[[], Timed] | None


class Combination(Protocol):
    """One kernel on one kind of input."""

    @property
    def name(self) -> str:
        """The kernel, the input and the activations' dtype in words."""
        ...

    @property
    def shares(self) -> str:
        """What compiled kernels it shares: those of one word compile them once in a process."""
        ...

    @property
    def timed(self) -> bool:
        """Whether times are wanted too, for which more is compiled."""
        ...

    def run(self) -> Ran:
        """Compile it, compare it with truth, and get its times ready."""
        ...


@dataclass(frozen=True)
class Experts:
    """A format and an activation dtype on the fused path."""

    storage: Storage
    dtype: str
    timed: bool = False

    @property
    def name(self) -> str:
        """The format and the dtype."""
        return f"experts, {_label(self.storage)} in {self.dtype}"

    @property
    def shares(self) -> str:
        """The products that dispatch and truth need are float32, whatever the activations are."""
        return _label(self.storage)

    def run(self) -> Ran:
        """The fused path on random weights against truth."""
        storage, activation = self.storage, activations.make("swiglu")
        mx.random.seed(storage.bits)
        container = SwitchGLU(_WIDTH, _EXPERT_WIDTH, _EXPERTS)
        container.eval()
        if storage.bits:
            nn.quantize(container, group_size=storage.group_size, bits=storage.bits, mode=storage.mode)
        x = mx.random.normal((1, 1, _WIDTH)).astype(getattr(mx, self.dtype))
        indices = mx.arange(_TOP_K)[None, None]
        weights = mx.softmax(mx.random.normal((1, 1, _TOP_K)), axis=-1)
        trace.reset()
        got = ExpertDispatch("device", activation, True)(container, x, indices, weights)
        mx.eval(got)
        row = trace.snapshot()[0]
        trial = partial(Trial, "experts", _label(storage), self.dtype, _BOUNDS[self.dtype])
        if row.path != "fused":
            return Ran(trial(None, row.reason), None)
        experts = expert_weights.read(container, activation)
        assert experts is not None
        truth = np.array(naive.experts_in_float32(experts, x, indices, weights), dtype=np.float64)
        error = np.linalg.norm(np.array(got.astype(mx.float32)) - truth) / np.linalg.norm(truth)
        return Ran(trial(float(error)), None)


@dataclass(frozen=True)
class TimedExperts:
    """The fused path against gathered products, at a model's widths."""

    storage: Storage
    dtype: str
    timed: bool = True

    @property
    def name(self) -> str:
        """The format and the dtype."""
        return f"time of experts, {_label(self.storage)} in {self.dtype}"

    @property
    def shares(self) -> str:
        """Kernels of these widths and scales of this dtype serve nothing else."""
        return self.name

    def run(self) -> Ran:
        """Make the weights and call both paths, which compiles them."""
        layer = bench_experts.random_layer(
            _HIDDEN,
            _WIDE,
            _HELD,
            _PICKED,
            activations.make("swiglu"),
            storage=self.storage,
            dtype=getattr(mx, self.dtype),
        )
        bench_experts.compare(layer, rounds=_REHEARSED)
        return Ran(None, partial(self._time, layer))

    def _time(self, layer: bench_experts.Layer) -> Timed:
        result = bench_experts.compare(layer, rounds=_ROUNDS)
        times = (round(us, 1) for us in (result.fused_us, result.baseline_us))
        return Timed("experts", _label(self.storage), self.dtype, *times)


@dataclass(frozen=True)
class Piece:
    """A kernel beside the experts'."""

    kernel: str
    dtype: str
    timed: bool

    @property
    def name(self) -> str:
        """The kernel and the dtype."""
        return f"{self.kernel} in {self.dtype}"

    @property
    def shares(self) -> str:
        """The kernels of its name and dtype, which another may have as well."""
        return f"{pieces.shares(self.kernel)} in {self.dtype}"

    def run(self) -> Ran:
        """The kernel on random inputs against truth."""
        device, dtype = current_device(), getattr(mx, self.dtype)
        attempt = pieces.attempt(self.kernel, device, dtype)
        bound = _BOUNDS[self.dtype]
        if isinstance(attempt, Decline):
            return Ran(Trial(self.kernel, "", self.dtype, bound, None, attempt.rule), None)
        trial = Trial(self.kernel, attempt.what, self.dtype, bound, attempt.error())
        if not self.timed:
            return Ran(trial, None)
        mx.eval(attempt.plain())
        return Ran(trial, partial(self._time, attempt))

    def _time(self, attempt: pieces.Attempt) -> Timed:
        return Timed(self.kernel, attempt.what, self.dtype, *_in_turn(attempt.run, attempt.plain))


def all_of(device: Device, *, times: bool) -> list[Combination]:
    """What is tried on a device, in the order of a receipt; ``times`` adds what is timed."""
    default = bench_experts.default_dtype()
    asked: list[Combination] = [Experts(storage, dtype) for storage in _FORMATS for dtype in _BOUNDS]
    if times:
        asked += [TimedExperts(storage, default) for storage in _TIMED]
    for dtype in _BOUNDS:
        asked += [Piece(kernel, dtype, times and dtype == default) for kernel in pieces.kernels(device)]
    return asked


def _label(storage: Storage) -> str:
    return f"{storage.mode} {storage.bits}-bit" if storage.bits else storage.mode


def _in_turn(ours: Callable[[], list[mx.array]], plain: Callable[[], list[mx.array]]) -> tuple[float, float]:
    """Medians of microseconds a call."""
    sides = (ours, plain)
    calls = {str(i): partial(_call, side) for i, side in enumerate(sides)}
    times = bench_experts.interleaved(calls, rounds=_ROUNDS)
    first, second = (round(median(seconds) / _CALLS * 1e6, 1) for seconds in times.values())
    return first, second


def _call(side: Callable[[], list[mx.array]], number: int) -> None:
    """Several calls, waited for together."""
    mx.eval([side() for _ in range(_CALLS)])
