"""What a run of this machine's kernels says: each trial, each time, and a verdict in one paragraph."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlx_experts.engine.kernels.request import Device
from mlx_experts.engine.tools import bench_experts


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
