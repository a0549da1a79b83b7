"""Compiles the CPU's kernels while a checkpoint is read, in as many processes as there are cores.

numba compiles one function at a time in a process and keeps its code on disk. What the first token of a
machine would wait for is compiled by processes beside this one, which end when their share is on disk. A
machine on which it is there already starts none.

``python -m mlx_experts.engine.kernels.cpu.warm NAME ...`` compiles the named ones, and without a name all
that are not on disk.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_experts.engine.kernels.cpu import start

_STACK, _VECTOR, _ROWS, _CHOSEN = "int64[::1]", "float32[::1]", "float32[:,::1]", "int32[:,::1]"
_LAYER = f"boolean, {_STACK}, {_STACK}, {_STACK}, int64, float32, float32, int64"
_MANY = f"({_LAYER}, int64, int64, {_STACK}, boolean, {_ROWS}, {_CHOSEN}, {_ROWS}, {_ROWS})"
_PROMPT = f"int64, UniTuple(int64, 5), {_ROWS}, {_ROWS}, {_ROWS}, float32, int64, boolean[:,::1]"
_CACHE = "float32[:,:,::1]"
_LINEAR = f"({_STACK}, int64, int64, {_ROWS}, {_ROWS})"


@dataclass(frozen=True)
class Compiled:
    """One computation that numba compiles.

    Args:
        module: the module that has it.
        name: its name there.
        signature: numba's, the only one that the kernels call it with.
        seconds: about how long it takes to compile.
    """

    module: str
    name: str
    signature: str
    seconds: float

    def found(self) -> Any:
        """What the module has under the name."""
        return getattr(importlib.import_module(f"{__package__}.{self.module}"), self.name)

    def function(self) -> Any:
        """numba's dispatcher."""
        from mlx_experts.engine.kernels.cpu.numba_forms import Forms

        found = self.found()
        return found.function if isinstance(found, Forms) else found

    def compile(self) -> None:
        """Compile everything that a call runs, and keep it on disk."""
        from numba.core import sigutils

        from mlx_experts.engine.kernels.cpu.numba_forms import Forms

        # numba files code under the types themselves.
        arguments, _ = sigutils.normalize_signature(self.signature)
        found = self.found()
        compile = found.compiled if isinstance(found, Forms) else found.compile
        compile(tuple(arguments))

    def on_disk(self) -> bool:
        """Whether a process has kept it, or none could."""
        from mlx_experts.engine.kernels.cpu.numba_forms import on_disk

        function = self.function()
        return function.stats.cache_path is None or on_disk(function.py_func)


WORTH = 2
"""Seconds of compiling from which other processes are worth their start."""
ALL = (
    Compiled("unit", "linear_on_unit", _LINEAR, 0.6),
    Compiled("attention", "attend_many", f"({_PROMPT}, {_VECTOR}, {_ROWS})", 1.3),
    Compiled("unit", "experts_on_unit", _MANY, 1.4),
    Compiled("driver", "linear", _LINEAR, 0.9),
    Compiled("driver", "many_tokens", _MANY, 1.8),
    Compiled("steps", "steps", "(int64, int64, int64, int64, int64)", 1.9),
    Compiled("token", "attend", f"({_ROWS}, {_CACHE}, {_CACHE}, int64, float32, {_ROWS})", 0.3),
)
"""Every computation that a token may need, in the order in which a prompt and then a token call them."""


def needed() -> tuple[Compiled, ...]:
    """What a model's first token needs on this machine."""
    from mlx_experts.engine.kernels.cpu.products import amx

    other = ("linear", "many_tokens") if amx.available() else ("linear_on_unit", "experts_on_unit")
    return tuple(each for each in ALL if each.name not in other)


@lru_cache(maxsize=1)
def begin() -> None:
    """Start the processes that compile what is not on disk; ``start.wait_for`` waits for them."""
    if start.unavailable() is not None:
        return
    missing = [each for each in needed() if not each.on_disk()]
    if cores() < 2 or len(missing) < 2 or sum(each.seconds for each in missing) < WORTH:
        return  # this process compiles what it calls
    start.tell_of_compiling()
    start.WARMING.extend(_started(missing))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _started(missing: list[Compiled]) -> list[subprocess.Popen[bytes]]:
    """Processes that compile these functions, one a core."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", "mlx_experts.engine.kernels.cpu.warm", *(each.name for each in share)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for share in _shares(missing, cores())
    ]


def _shares(missing: list[Compiled], processes: int) -> list[list[Compiled]]:
    """What each of at most ``processes`` compiles in its turn, so that they end at about one time."""
    shares: list[list[Compiled]] = [[] for _ in range(min(processes, len(missing)))]
    for each in sorted(missing, key=lambda each: -each.seconds):
        min(shares, key=lambda share: sum(other.seconds for other in share)).append(each)
    return [sorted(share, key=missing.index) for share in shares]


def main(names: list[str]) -> None:
    """Compile functions by their keys, and keep them on disk; without a key, all, in several processes."""
    if start.unavailable() is not None:
        return
    if not names:
        for process in _started([each for each in ALL if not each.on_disk()]):
            process.wait()
        return
    for each in ALL:
        if each.name in names:
            each.compile()


if __name__ == "__main__":
    main(sys.argv[1:])
