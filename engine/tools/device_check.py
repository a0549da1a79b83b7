"""Says whether this machine's kernels may be trusted, by running them against float32 truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_experts.engine.dispatch.expert_dispatch import ExpertDispatch, current_device
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.kernels.expert_weights import dtype_name
from mlx_experts.engine.kernels.request import Device
from mlx_experts.engine.tools import bench_experts, device_pieces
from mlx_experts.engine.tools.bench_experts import Storage

# (mode, bits, group size), each with every activation dtype.
_FORMATS = (
    ("affine", 4, 64),
    ("affine", 8, 64),
    ("affine", 6, 64),
    ("affine", 3, 32),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("plain", 0, 0),
)
_DTYPES = ((mx.float32, 1e-5), (mx.bfloat16, 5e-3), (mx.float16, 5e-3))
_WIDTH, _EXPERT_WIDTH, _EXPERTS, _TOP_K = 256, 128, 8, 4
# What is timed: experts of qwen3_moe's widths, few enough that making them takes no time.
_TIMED = (Storage("affine", 4, 64), Storage("affine", 8, 64), Storage("mxfp4", 4, 32))
_HIDDEN, _WIDE, _HELD, _PICKED = 2048, 768, 24, 8
_ROUNDS, _CALLS = 9, 8


@dataclass(frozen=True)
class Trial:
    """One kernel on one kind of input.

    Args:
        error: relative RMS distance to the truth; None where it did not run.
        bound: the largest that is right.
        reason: why it did not run.
    """

    kernel: str
    what: str
    dtype: str
    bound: float
    error: float | None
    reason: str = ""

    @property
    def name(self) -> str:
        """The input in words."""
        return f"{self.what} in {self.dtype}" if self.what else self.dtype

    def words(self) -> str:
        """The input and how far off it is; kernels beside the experts' are named."""
        kernel = "" if self.kernel == "experts" else f"{self.kernel}, "
        return f"{kernel}{self.name}: {self.error:.1e}"

    @property
    def agrees(self) -> bool:
        """Whether it ran and is right; a NaN is not."""
        return self.error is not None and self.error < self.bound


@dataclass(frozen=True)
class Timed:
    """Microseconds of one call, in turn, host included: this package's kernel and MLX's operations."""

    kernel: str
    what: str
    dtype: str
    ours_us: float
    mlx_us: float


@dataclass(frozen=True)
class DeviceReport:
    """What this machine's kernels did."""

    device: Device
    trials: tuple[Trial, ...]
    times: tuple[Timed, ...]
    seconds: float

    @property
    def wrong(self) -> list[Trial]:
        """Those that ran and are not right."""
        return [t for t in self.trials if t.error is not None and not t.agrees]

    def verdict(self) -> str:
        """One paragraph for a person."""
        experts = [t for t in self.trials if t.kernel == "experts"]
        left = [f"{t.name} ({t.reason})" for t in experts if t.error is None]
        ran = len(experts) - len(left)
        text = f"Device {self.device}: {ran} of {len(experts)} combinations"
        text += " of format and activation dtype ran fused"
        text += f"; {len(left)} were left to the gather path: {', '.join(left)}." if left else "."
        beside = _beside([t for t in self.trials if t.kernel != "experts"])
        text += f" Beside the experts: {beside}." if beside else ""
        if self.wrong:
            wrong = (t.words() for t in self.wrong)
            return (
                f"{text} DO NOT TRUST IT: these are farther from the float32 truth than allowed: "
                f"{', '.join(wrong)}. Set MLX_EXPERTS_FUSED=0 and report this paragraph."
            )
        if not ran:
            return f"{text} No experts ran fused, so this machine says nothing about the kernels."
        return (
            f"{text} All of them agree with the float32 truth (relative RMS under 1e-5 in float32 and 5e-3 "
            "in bfloat16 and float16): this machine may trust the fused path. `registry tune` finds its "
            "break-even."
        )

    def receipt(self, ran_on: dict[str, str]) -> dict[str, Any]:
        """What a file says about the run.

        Args:
            ran_on: versions and machine.
        """
        return {
            "ran_on": {**ran_on, **bench_experts.about()},
            "device": self.device,
            "trusted": not self.wrong and any(t.agrees for t in self.trials),
            "verdict": self.verdict(),
            "trials": [{**asdict(t), "agrees": t.agrees} for t in self.trials],
            "times": [{**asdict(t), "ratio": round(t.mlx_us / t.ours_us, 2)} for t in self.times],
            "seconds": round(self.seconds, 1),
        }


def _beside(trials: list[Trial]) -> str:
    """How many kinds of input each other kernel ran on, or why it ran on none."""
    words = []
    for kernel in dict.fromkeys(t.kernel for t in trials):
        its = [t for t in trials if t.kernel == kernel]
        ran = sum(t.error is not None for t in its)
        words.append(f"{kernel} ({ran} of {len(its)})" if ran else f"no {kernel} ({its[0].reason})")
    return ", ".join(words)


def run(*, times: bool = False) -> DeviceReport:
    """Run every kernel of this device; ``times`` compares some with MLX's operations too."""
    started, device = time.perf_counter(), current_device()
    trials = _experts()
    timed = _time_experts(device) if times else []
    default = bench_experts.default_dtype()
    for dtype, bound in _DTYPES:
        for attempt in device_pieces.attempts(device, dtype):
            if isinstance(attempt, tuple):
                kernel, why = attempt
                trials.append(Trial(kernel, "", dtype_name(dtype), bound, None, why.rule))
                continue
            name = attempt.kernel, attempt.what, dtype_name(dtype)
            trials.append(Trial(*name, bound, attempt.error()))
            if times and dtype_name(dtype) == default:
                timed.append(Timed(*name, *_in_turn(attempt.run, attempt.plain)))
    trace.reset()
    return DeviceReport(device, tuple(trials), tuple(timed), time.perf_counter() - started)


def verdict() -> str:
    """The paragraph alone."""
    return run().verdict()


def _experts() -> list[Trial]:
    """Every format and activation dtype on the fused path."""
    trials = []
    activation = activations.make("swiglu")
    for mode, bits, group in _FORMATS:
        mx.random.seed(bits)
        container = SwitchGLU(_WIDTH, _EXPERT_WIDTH, _EXPERTS)
        container.eval()
        if mode != "plain":
            nn.quantize(container, group_size=group, bits=bits, mode=mode)
        label = mode if mode == "plain" else f"{mode} {bits}-bit"
        for dtype, bound in _DTYPES:
            x = mx.random.normal((1, 1, _WIDTH)).astype(dtype)
            indices = mx.arange(_TOP_K)[None, None]
            weights = mx.softmax(mx.random.normal((1, 1, _TOP_K)), axis=-1)
            trace.reset()
            got = ExpertDispatch("device", activation, True)(container, x, indices, weights)
            mx.eval(got)
            row = trace.snapshot()[0]
            name = "experts", label, dtype_name(dtype)
            if row.path != "fused":
                trials.append(Trial(*name, bound, None, row.reason))
                continue
            experts = expert_weights.read(container, activation)
            assert experts is not None
            truth = np.array(naive.experts_in_float32(experts, x, indices, weights), dtype=np.float64)
            error = np.linalg.norm(np.array(got.astype(mx.float32)) - truth) / np.linalg.norm(truth)
            trials.append(Trial(*name, bound, float(error)))
    return trials


def _time_experts(device: Device) -> list[Timed]:
    """The fused path against gathered products, in the dtype that this device uses."""
    timed, dtype = [], bench_experts.default_dtype()
    for storage in _TIMED:
        layer = bench_experts.random_layer(
            _HIDDEN,
            _WIDE,
            _HELD,
            _PICKED,
            activations.make("swiglu"),
            storage=storage,
            dtype=getattr(mx, dtype),
        )
        result = bench_experts.compare(layer, rounds=_ROUNDS)
        what = f"{storage.mode} {storage.bits}-bit"
        timed.append(Timed("experts", what, dtype, round(result.fused_us, 1), round(result.baseline_us, 1)))
    return timed


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
