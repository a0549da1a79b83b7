"""Combinations that tell what the processes that run them do, and that fail as kernels fail."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from mlx_experts.engine.tools.device.combinations import Ran
from mlx_experts.engine.tools.device.report import Timed, Trial
from mlx_experts.registry.errors import SettingError

# Seconds of a step: long beside what processes that began together drift apart.
LASTS = 0.3


@dataclass(frozen=True)
class Noted:
    """Writes down when it ran, and in which process.

    Args:
        folder: gets a file for each step, and one for each process.
        processes: that have to be there before it runs.
    """

    name: str
    shares: str
    folder: Path
    timed: bool = False
    processes: int = 1

    def run(self) -> Ran:
        """Last a while."""
        (self.folder / str(os.getpid())).touch()
        while sum(path.name.isdigit() for path in self.folder.iterdir()) < self.processes:
            time.sleep(0.01)
        self._note("run")
        trial = Trial(self.name, "", "float32", 1e-5, 0.0)
        return Ran(trial, self._time if self.timed else None)

    def _time(self) -> Timed:
        self._note("time")
        return Timed(self.name, "", "float32", 1.0, 2.0)

    def _note(self, step: str) -> None:
        begun = time.monotonic()
        time.sleep(LASTS)
        text = f"{os.getpid()} {begun} {time.monotonic()}"
        (self.folder / f"{step} {self.name}").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Failing:
    """Fails in one way or another, when it runs or when it is timed.

    Args:
        how: "killed" by the system, "broken" as MLX breaks, "refused" with an error of ours.
    """

    name: str
    how: str
    timed: bool = False
    shares: str = ""

    def run(self) -> Ran:
        """Fail now, or later."""
        if not self.timed:
            self._fail()
        return Ran(None, self._fail)

    def _fail(self) -> Timed:
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refused":
            raise SettingError("No fused kernel takes this call.", where="rows")
        raise RuntimeError("Failed to compile kernel: identifier is undefined.")
