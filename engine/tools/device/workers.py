"""Runs combinations in several processes: MLX compiles this package's kernels anew in each, on one core.

A process compiles and compares what it is given, one combination after another. When all are done, the times
are taken, one at a time across all processes, by those that have compiled for them. The processes are
spawned, because a copy of this one would have no threads and no device. They end when this process does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import mlx.core as mx

from mlx_experts.engine.kernels.cpu import start, warm
from mlx_experts.engine.kernels.request import Device
from mlx_experts.engine.tools.device import compiled
from mlx_experts.engine.tools.device.combinations import Combination
from mlx_experts.engine.tools.device.report import Timed, Trial
from mlx_experts.plugins.manager import add_plugin_file, plugin_files
from mlx_experts.registry.errors import DeviceError, RegistryError

# Seconds that a process may take to end by itself, and once it is told to.
_BY_ITSELF, _ONCE_TOLD = 5.0, 2.0
_IN_ONE = "with `--jobs 1` all runs in one process, which keeps a report of what goes wrong in it"


@dataclass(frozen=True)
class _Tried:
    """A combination that has run, and whether its times are to be taken."""

    trial: Trial | None
    to_time: bool


@dataclass(frozen=True)
class _Failed:
    """What went wrong in a process that nobody foresaw."""

    what: str


_Answer = _Tried | Timed | _Failed | RegistryError


@dataclass(eq=False)
class _Worker:
    """A process and what it has done.

    Args:
        compiled: its folder of MLX's compiled kernels.
        doing: the combination that it was given last.
        shares: what kernels are shared by that it has compiled.
        to_time: combinations, by their numbers, that it has compiled for their times.
    """

    process: SpawnProcess
    link: Connection
    compiled: Path
    doing: Combination = field(init=False)
    shares: set[str] = field(default_factory=set)
    to_time: list[int] = field(default_factory=list)

    def ask(self, number: int, combination: Combination, *, times: bool = False) -> None:
        """Give it a combination to run, or to time one that it has run.

        Raises:
            DeviceError: the process has ended.
        """
        self.doing = combination
        try:
            self.link.send((number, None if times else combination))
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None

    def answer(self) -> _Tried | Timed:
        """What it says of the combination that it was given last.

        Raises:
            DeviceError: the combination failed, or the process has ended.
            RegistryError: what the combination raised.
        """
        try:
            said: _Answer = self.link.recv()
        except (EOFError, ConnectionResetError):
            raise self._gone() from None
        if isinstance(said, RegistryError):
            raise said.within(self.doing.name)
        if isinstance(said, _Failed):
            raise DeviceError(
                "A kernel of this device could not be run.",
                where=self.doing.name,
                expected="outputs to compare with truth",
                found=said.what,
                hint=_IN_ONE,
            )
        return said

    def _gone(self) -> DeviceError:
        """The error for a process that is no more."""
        self.process.join(_ONCE_TOLD)
        code = self.process.exitcode
        by = f"the signal '{signal.strsignal(-code)}'" if code and code < 0 else f"exit code {code}"
        return DeviceError(
            "A process that ran this device's kernels ended before it was done.",
            where=self.doing.name,
            expected="outputs to compare with truth",
            found=by,
            hint=f"where memory ran out, a smaller `--jobs` needs less; {_IN_ONE}",
        )


def run(asked: Sequence[Combination], device: Device, jobs: int) -> tuple[list[Trial], list[Timed]]:
    """Trials and times of all combinations, each in the order in which they are asked for.

    Args:
        jobs: processes, of which each has the device's memory for itself.

    Raises:
        DeviceError: a combination failed, or a process ended before it was done.
        RegistryError: what a combination raised.
    """
    if device == "cpu":
        # What is not on disk is compiled once, and not in every process.
        warm.begin()
        for compiling in start.WARMING:
            compiling.wait()
    with (
        tempfile.TemporaryDirectory(prefix="mlx-experts-", ignore_cleanup_errors=True) as folder,
        _started(jobs, device, Path(folder)) as workers,
    ):
        trials = _trials(workers, asked)
        # Nothing else runs beside what is timed.
        _end([worker for worker in workers if not worker.to_time])
        times = _times(workers, asked)
        _end(workers)
        # All have answered, so none was writing when it ended.
        compiled.keep(worker.compiled for worker in workers)
        return trials, times


def _trials(workers: Sequence[_Worker], asked: Sequence[Combination]) -> list[Trial]:
    """Run every combination once, each in the first process that is free for it."""
    left, begun = list(range(len(asked))), set[str]()
    running: dict[_Worker, int] = {}
    found: dict[int, Trial] = {}

    def give(worker: _Worker) -> None:
        if not left:
            return
        number = min(left, key=lambda each: _turn(asked[each], worker.shares, begun))
        left.remove(number)
        begun.add(asked[number].shares)
        worker.shares.add(asked[number].shares)
        worker.ask(number, asked[number])
        running[worker] = number

    for worker in workers:
        give(worker)
    while running:
        ready = wait([worker.link for worker in running])
        for worker in [each for each in running if each.link in ready]:
            number, said = running.pop(worker), worker.answer()
            assert isinstance(said, _Tried)
            if said.trial is not None:
                found[number] = said.trial
            if said.to_time:
                worker.to_time.append(number)
            give(worker)
    return [found[number] for number in sorted(found)]


def _turn(combination: Combination, compiled: set[str], begun: set[str]) -> tuple[int, bool]:
    """Which combination a process takes next, the least first: by what it has compiled, then the long ones.

    A process takes what shares kernels with another's combinations when nothing else is left. So none has
    several to go while others wait.

    Args:
        compiled: what kernels are shared by that the process has.
        begun: the same of all processes.
    """
    if combination.shares in compiled:
        return 0, not combination.timed
    return (2 if combination.shares in begun else 1), not combination.timed


def _times(workers: Sequence[_Worker], asked: Sequence[Combination]) -> list[Timed]:
    """One combination after another, while all other processes wait."""
    timed = []
    for number, worker in sorted(((n, each) for each in workers for n in each.to_time), key=lambda o: o[0]):
        worker.ask(number, asked[number], times=True)
        said = worker.answer()
        assert isinstance(said, Timed)
        timed.append(said)
    return timed


@contextmanager
def _started(jobs: int, device: Device, folder: Path) -> Iterator[list[_Worker]]:
    """The processes, which have ended when this is left, however it is left."""
    workers: list[_Worker] = []
    try:
        with _interrupts_held():
            for number in range(jobs):
                workers.append(_start(device, folder / str(number)))
        yield workers
        _end(workers)
    finally:
        for worker in workers:
            worker.process.terminate()
        _end(workers)


def _end(workers: Sequence[_Worker]) -> None:
    """Let processes end, as they do when nobody can ask them any more; make them where that takes long."""
    for worker in workers:
        worker.link.close()
    for worker in workers:
        worker.process.join(_BY_ITSELF)
        worker.process.terminate()
        worker.process.join(_ONCE_TOLD)
        worker.process.kill()
        worker.process.join()


def _start(device: Device, folder: Path) -> _Worker:
    """One process, which waits for combinations."""
    compiled.lend(folder)
    ours, theirs = multiprocessing.Pipe()
    # What is daemonic ends with this process at the latest.
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(theirs, device, folder, plugin_files()), daemon=True
    )
    process.start()
    theirs.close()
    return _Worker(process, ours, folder)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let an interrupt wait, and let processes that are started meanwhile never see one.

    A terminal interrupts all processes at once; this one then ends the others.
    """
    if sys.platform == "win32":
        yield
        return
    # It starts with the first process, and lets interrupts through.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(link: Connection, device: Device, folder: Path, plugins: Sequence[Path]) -> None:
    """What a process does: runs and times what it is given until nobody can ask it any more."""
    os.environ[compiled.VARIABLE] = str(folder)
    if device == "cpu":
        mx.set_default_device(mx.cpu)
    for path in plugins:
        add_plugin_file(path)
    times: dict[int, Callable[[], Timed]] = {}
    while True:
        try:
            link.send(_done(times, *link.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _done(times: dict[int, Callable[[], Timed]], number: int, combination: Combination | None) -> _Answer:
    """Run a combination and keep what takes its times, or take those of one that is kept."""
    try:
        if combination is None:
            return times[number]()
        trial, time = combination.run()
    except RegistryError as error:
        return error
    except Exception as bug:  # noqa: BLE001 - the outermost frame of a process hands a bug to the one that asked
        return _Failed(f"{type(bug).__name__}: {bug}")
    if time is not None:
        times[number] = time
    return _Tried(trial, time is not None)
