"""Whether numba is there and starts, and who may run its threads.

Imported before numba is: a machine without it learns here why the CPU kernels are left alone.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlx_experts.engine.kernels.request import Decline
from mlx_experts.registry import settings

if TYPE_CHECKING:
    from types import ModuleType

    from mlx_experts.engine.kernels.cpu.numba_forms import Forms

LOG = logging.getLogger("mlx_experts.kernels")

# One parallel region at a time: numba's portable thread pool aborts the process on concurrent use.
LOCK = threading.Lock()

# One start at a time: it changes the environment for as long as it lasts.
_STARTING = threading.Lock()

# Processes that compile beside this one (``warm``).
WARMING: list[subprocess.Popen[bytes]] = []

# Below this many bytes of weights a token, waking the other threads costs more than they save.
PARALLEL_FROM = 1 << 20

_LEAST_OUTPUTS, _MOST_OUTPUTS = 32, 128


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernel, or None."""
    driver = _numba()
    return driver if isinstance(driver, Decline) else None


@lru_cache(maxsize=1)
def _numba() -> ModuleType | Decline:
    """``cpu_driver`` with its threads started, or why numba is not there or does not work."""
    try:
        import numba
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        return Decline("numba", "numba installed", "no numba", "pip install 'mlx-experts[cpu]'")
    except ImportError as error:  # numba refuses a NumPy that it does not know
        return _not_started(error, "Install a numba and a NumPy that belong together.")
    except ValueError as error:
        return _not_started(error, "Unset NUMBA_NUM_THREADS, or set it to 1 or more.")
    if numba.config.DISABLE_JIT:
        return Decline("numba", "numba that compiles", "NUMBA_DISABLE_JIT set", "Unset NUMBA_DISABLE_JIT.")
    from mlx_experts.engine.kernels.cpu import native

    if lacking := native.lacking():
        return Decline(
            "processor",
            "AVX2, FMA and F16C",
            f"{native.target()[0]} without {lacking}",
            "MLX computes instead.",
        )
    from mlx_experts.engine.kernels.cpu import driver as cpu_driver

    teller()
    try:
        with _STARTING:
            cpu_driver.start_threads()
    except ValueError as error:
        return _not_started(
            error,
            "Unset NUMBA_THREADING_LAYER and NUMBA_THREADING_LAYER_PRIORITY, or name a layer that is here.",
        )
    return cpu_driver


@lru_cache(maxsize=1)
def tell_of_compiling() -> None:
    """Log once in this process that numba compiles: the first token of a machine waits for it."""
    LOG.info("compiling the CPU's kernels: some seconds, once on this machine")


@lru_cache(maxsize=1)
def teller() -> Any:
    """What hears of numba compiling in this process, as long as the process lasts."""
    from numba.core import event

    class Teller(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            if str(event.data["dispatcher"].py_func.__module__).startswith(__package__):
                tell_of_compiling()

        def on_end(self, event: Any) -> None:
            """Nothing: what follows is the first token."""

    made = Teller()
    event.register("numba:compile", made)
    return made


def _not_started(error: Exception, hint: str) -> Decline:
    """The Decline for what numba said at its start; its first line; further ones are its own advice."""
    return Decline("numba", "numba that starts", str(error).splitlines()[0].rstrip("."), hint)


# Whether this process is a copy of one that had numba's threads: they are not in it, and OpenMP ends a
# process that asks for them.
_forked = False


def _in_child() -> None:
    """What a fork leaves behind: a lock that may be held by a thread that is not here, and no threads."""
    global LOCK, _forked
    LOCK, _forked = threading.Lock(), _numba.cache_info().currsize > 0
    WARMING.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_in_child)


class _Asked(threading.local):
    """How many threads numba was told to use for this thread."""

    count = 0


_asked = _Asked()


def run(forms: Forms, large: bool, *arguments: Any) -> Any:
    """Run one computation, on all threads where it is large and they are there."""
    with LOCK:
        return run_alone(forms, large, *arguments)


def run_alone(forms: Forms, large: bool, *arguments: Any) -> Any:
    """As :func:`run`, for whoever holds ``LOCK``."""
    if large and not _forked:
        # numba keeps the number for each of the threads that call; telling it again takes microseconds.
        if _asked.count != _threads():
            compiled().use_threads(_threads())
            _asked.count = _threads()
        return forms.parallel(*arguments)
    return forms.serial(*arguments)


def wait_for(function: Callable[..., Any]) -> None:
    """Wait while the processes beside this one may still compile a function, which then is on disk."""
    if not WARMING:
        return
    from mlx_experts.engine.kernels.cpu.numba_forms import on_disk

    while not on_disk(function) and any(process.poll() is None for process in WARMING):
        time.sleep(0.01)
    WARMING[:] = [process for process in WARMING if process.poll() is None]


def parts() -> int:
    """Into how many pieces a large computation is cut: some for each thread, so that none waits long."""
    return 4 * _threads()


def outputs_at_once(outputs: int) -> int:
    """Outputs of one token's experts that a task sums: long pieces of memory, and yet enough tasks."""
    return min(_MOST_OUTPUTS, max(_LEAST_OUTPUTS, outputs // parts() // _LEAST_OUTPUTS * _LEAST_OUTPUTS))


def shares() -> int:
    """Into how many pieces the matrix unit's work is cut: one for each thread, near which its inputs stay."""
    return _threads()


@lru_cache(maxsize=1)
def _threads() -> int:
    """How many threads the kernels run on."""
    most = int(compiled().get_num_threads())
    return min(settings.read().cpu_threads or most, most)


def compiled() -> ModuleType:
    """``cpu_driver``, on a machine that ``unavailable`` has not turned away."""
    driver: Any = _numba()
    return driver  # type: ignore[no-any-return]
