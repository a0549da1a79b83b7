"""A layer's expert container with slots for some of its experts, filled from the checkpoint's files.

Whoever calls the experts names them by their own numbers; here they are put into slots, the least recently
used leaving first, and the numbers become the slots'. On the CPU a slot is read straight into the memory that
the kernels read; elsewhere it is an update of the layer's arrays, which MLX orders after their earlier uses.
Legend: E experts, K experts per token, S slots.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_experts.engine.kernels.memory.account import MemoryAccount
from mlx_experts.engine.kernels.memory.views import FileView, changed, numpy_type
from mlx_experts.registry.errors import CheckpointError, SettingError

# Disks answer several reads at once faster than one after another.
READERS = 4

Plane = tuple[str, str]
"""A projection of the container and the name of one of its arrays."""


class ExpertFiles:
    """The files that experts are read from, held open, and the threads that read them.

    A file that is removed or replaced goes on to be read as it was; one that is written to is noticed.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="expert-reader")
        self._open: dict[str, tuple[int, tuple[int, int]]] = {}

    def open(self, files: set[str]) -> None:
        """Open files, once each.

        Raises:
            CheckpointError: one cannot be opened.
        """
        for file in sorted(files - self._open.keys()):
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(
                    "The experts' file cannot be opened.", where=file, found=error.strerror or str(error)
                ) from None
            self._open[file] = (descriptor, _state(descriptor))

    def read(self, jobs: Sequence[tuple[FileView, np.ndarray]]) -> None:
        """Read views into bytes, several at once.

        Raises:
            CheckpointError: a file changed since it was opened, or cannot be read.
        """
        # A thread costs as much to ask as a small read: each is asked once, for every READERS-th view.
        shares = [jobs[i::READERS] for i in range(min(READERS, len(jobs)))]
        running = [self._threads.submit(self._read_all, share) for share in shares]
        faults = [fault for job in running if (fault := job.exception()) is not None]
        for file in {view.file for view, _ in jobs}:
            descriptor, before = self._open[file]
            if _state(descriptor) != before:
                raise changed(file)
        if faults:
            raise faults[0]

    def _read_all(self, jobs: Sequence[tuple[FileView, np.ndarray]]) -> None:
        for view, out in jobs:
            view.read(self._open[view.file][0], out)

    def close(self) -> None:
        """End the threads and close the files."""
        self._threads.shutdown()
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __del__(self) -> None:
        self.close()


def _state(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, eq=False)
class Part:
    """Experts of one call that are in memory together.

    Args:
        slots: like the call's indices, int32: the slot of each expert, or -1 where it is of another part.
        turn: the slots in the order of the experts, int64.
        alone: whether the call has no other part.
    """

    slots: np.ndarray
    turn: np.ndarray
    alone: bool


class ExpertSlots:
    """Slots for S of a layer's E experts.

    Args:
        files: where they are read from.
        views: for each array of the container, its part of every expert's tensors.
        leaves: the container's projections, whose arrays become arrays of slots.
        slots: S, at least the experts of a token.
        account: counts hits, misses and waiting.
        in_place: read into the arrays' own memory, which only the CPU shares with MLX.
    """

    def __init__(
        self,
        files: ExpertFiles,
        views: Mapping[Plane, Sequence[FileView]],
        leaves: Mapping[str, nn.Module],
        slots: int,
        account: MemoryAccount,
        *,
        in_place: bool,
    ) -> None:
        self._files, self._views, self._leaves = files, dict(views), leaves
        self.experts, self.slots, self.account = len(next(iter(views.values()))), slots, account
        self.lock = threading.RLock()
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(slots))
        self._memory: dict[Plane, np.ndarray] | None = {} if in_place else None
        files.open({view.file for views in self._views.values() for view in views})
        for (leaf, name), each in self._views.items():
            # On the CPU the kernels read biases as float32, in their place.
            array = mx.zeros((slots, *each[0].shape), each[0].dtype)
            mx.eval(array)
            leaves[leaf][name] = array
            if self._memory is not None:
                self._memory[leaf, name] = _bytes_of(array).reshape(slots, -1)

    def __reduce__(self) -> NoReturn:
        raise SettingError(
            "a model whose experts stay in files cannot be copied",
            hint="load it again, or without expert_memory",
        )

    @property
    def bytes_each(self) -> int:
        """Bytes of one expert in memory."""
        return sum(views[0].nbytes for views in self._views.values())

    def parts(self, indices: np.ndarray) -> Iterator[Part]:
        """The experts of a call in parts that fit into the slots, in the order of the experts.

        A part's experts stay in memory until the next one is asked for; hold :attr:`lock` as long.

        Args:
            indices: integers ``[..., K]``.

        Raises:
            IndexError: an index is not an expert.
            CheckpointError: a file changed, or cannot be read.
        """
        wanted = np.unique(indices)
        if wanted.size and not 0 <= wanted[0] <= wanted[-1] < self.experts:
            bad = wanted[-1] if wanted[-1] >= self.experts else wanted[0]
            raise IndexError(f"expert {bad} of {self.experts}")
        for begin in range(0, wanted.size, self.slots):
            some = wanted[begin : begin + self.slots]
            held = np.full(self.experts, -1, np.int32)
            held[some] = turn = self._hold(some.tolist())
            yield Part(held[indices], np.array(turn, np.int64), wanted.size <= self.slots)

    def _hold(self, experts: list[int]) -> list[int]:
        """Put experts into slots, at most S; the slots, in their order."""
        missing = [expert for expert in experts if expert not in self._slot_of]
        for expert in experts:
            if expert in self._slot_of:
                self._slot_of.move_to_end(expert)
        start, count = time.perf_counter(), 0
        if missing:
            while len(self._free) < len(missing):
                self._free.append(self._slot_of.popitem(last=False)[1])
            taken = self._free[: len(missing)]
            count = self._read(missing, taken)
            # Only now: after an error the slots are free, whatever lies in them.
            del self._free[: len(missing)]
            self._slot_of.update(zip(missing, taken, strict=True))
        stall = time.perf_counter() - start if missing else 0.0
        self.account.add(len(experts) - len(missing), len(missing), count, stall)
        return [self._slot_of[expert] for expert in experts]

    def _read(self, experts: list[int], slots: list[int]) -> int:
        """Read experts into slots; how many bytes."""
        memory = self._memory
        jobs: list[tuple[FileView, np.ndarray]] = []
        staged: dict[Plane, np.ndarray] = {}
        for plane, views in self._views.items():
            if memory is None:
                staged[plane] = np.empty((len(experts), views[0].nbytes), np.uint8)
            rows = staged[plane] if memory is None else memory[plane]
            at = range(len(experts)) if memory is None else slots
            jobs += [(views[expert], rows[i]) for expert, i in zip(experts, at, strict=True)]
        self._files.read(jobs)
        where = mx.array(slots)
        for (leaf, name), rows in staged.items():
            view = self._views[leaf, name][0]
            found = mx.array(rows.view(numpy_type(view.dtype)).reshape(len(slots), *view.shape))
            self._leaves[leaf][name][where] = found.view(view.dtype)
        return sum(prod(view.shape) * view.stored.size for view, _ in jobs)


def _bytes_of(array: mx.array) -> np.ndarray:
    """The memory of an evaluated array, to be written to."""
    held: Any = (ctypes.c_char * array.nbytes).from_buffer(array)  # type: ignore[arg-type]
    return np.frombuffer(held, np.uint8)


class SlottedExperts(nn.Module):
    """An expert container whose arrays are slots; its experts are called by their own numbers."""

    def __init__(self, leaves: Mapping[str, nn.Module], slots: ExpertSlots) -> None:
        super().__init__()
        for name, leaf in leaves.items():
            self[name] = leaf
        self.slots = slots
