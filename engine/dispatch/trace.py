"""Counts which path every expert call took and why; always on.

Equal text does not prove that a kernel ran, so the counts are what tests and people look at. Layers that the
trace does not know have never been called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mlx_experts.engine.kernels.memory.account import MemoryAccount, MemoryRow, together

Path = Literal["fused", "grouped", "dequantized", "gather", "mlx", "compiled"]


@dataclass(frozen=True)
class TraceRow:
    """One line of the trace.

    Args:
        layer: the layer's module path.
        path: ``fused``, ``grouped`` or ``dequantized`` (many rows), or ``gather``; ``fused`` or ``mlx`` of a
            linear layer.
        rows: token rows of the call: ``1``, ``2``, then powers of two as ``3-4``, ``5-8`` ...
        reason: the kernel's name when fused, else the name of the gate rule that declined.
        count: calls.
        note: what the rule wanted and what it found, and what would change it.
    """

    layer: str
    path: Path
    rows: str
    reason: str
    count: int
    note: str = ""


@dataclass(frozen=True)
class TraceKey:
    """What calls are counted by; made once for each decision."""

    layer: str
    path: Path
    rows: str
    reason: str


def rows_label(rows: int) -> str:
    """The bucket that a number of rows is counted in."""
    if rows <= 2:
        return str(rows)
    high = 1 << (rows - 1).bit_length()
    return f"{high // 2 + 1}-{high}"


class Tally:
    """Counts the calls of one decision; made by :meth:`Trace.tally`."""

    __slots__ = ("_counted", "_lock", "count", "key", "note")

    def __init__(self, lock: threading.Lock, counted: list[_Counter], key: TraceKey, note: str) -> None:
        self._lock, self._counted, self.key, self.note, self.count = lock, counted, key, note, 0

    def add(self) -> None:
        """Count one call."""
        with self._lock:
            if not self.count:
                self._counted.append(self)
            self.count += 1

    @property
    def members(self) -> tuple[Tally, ...]:
        """What the count is of."""
        return (self,)


class _Together:
    """Tallies of one list that count together: one number stands for all of them."""

    __slots__ = ("_counted", "_lock", "count", "members")

    def __init__(self, members: tuple[Tally, ...]) -> None:
        self.members, self.count = members, 0
        self._lock, self._counted = members[0]._lock, members[0]._counted

    def add(self) -> None:
        """Count one call of each."""
        with self._lock:
            if not self.count:
                self._counted.append(self)
            self.count += 1


_Counter = Tally | _Together


class Tallies:
    """Several tallies that count together.

    Args:
        tallies: of any traces.
    """

    __slots__ = ("_groups",)

    def __init__(self, tallies: Iterable[Tally]) -> None:
        groups: dict[int, list[Tally]] = {}
        for tally in tallies:
            groups.setdefault(id(tally._counted), []).append(tally)
        self._groups = [_Together(tuple(group)) for group in groups.values()]

    def add(self) -> None:
        """Count one call of each."""
        for group in self._groups:
            group.add()


class Trace:
    """Counts of expert calls by layer, path, rows and reason, safe to use from several threads.

    What counts is a :class:`Tally`, made once for each decision, so that a call costs a lock and an addition.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Those that have counted since the last reset, in the order of their first calls.
        self._experts: list[_Counter] = []
        self._pieces: list[_Counter] = []
        self._memory: list[MemoryAccount] = []

    def memory_account(self, layer: str) -> MemoryAccount:
        """What counts a layer's reads of experts that stay in files."""
        return MemoryAccount(layer, self._memory.append)

    def memory(self) -> list[MemoryRow]:
        """The layers that looked for experts in files, as they stand."""
        return [account.row for account in list(self._memory)]

    def memory_total(self) -> MemoryRow | None:
        """All layers of :meth:`memory` together, or None where there are none."""
        rows = self.memory()
        return together(rows) if rows else None

    def tally(self, key: TraceKey, note: str = "") -> Tally:
        """What counts the calls of one decision. Calls of equal keys are one line, with the first's note."""
        return Tally(self._lock, self._experts, key, note)

    def piece_tally(self, key: TraceKey, note: str) -> Tally:
        """What counts the tokens of a layer that ran in compiled pieces; the note says which, and why not."""
        return Tally(self._lock, self._pieces, key, note)

    def reset(self) -> None:
        """Forget every count."""
        with self._lock:
            for counter in (*self._experts, *self._pieces):
                counter.count = 0
            self._experts.clear()
            self._pieces.clear()
            for account in self._memory:
                account.reset()
            self._memory.clear()

    def snapshot(self) -> list[TraceRow]:
        """The lines as they stand, in the order in which they first occurred."""
        return self._rows(self._experts)

    def pieces(self) -> list[TraceRow]:
        """The layers whose tokens ran in compiled pieces, as they stand."""
        return self._rows(self._pieces)

    def _rows(self, counters: list[_Counter]) -> list[TraceRow]:
        with self._lock:
            counted = [(t.key, counter.count, t.note) for counter in counters for t in counter.members]
        counts: dict[TraceKey, int] = {}
        notes: dict[TraceKey, str] = {}
        for key, count, note in counted:
            counts[key] = counts.get(key, 0) + count
            notes.setdefault(key, note)
        return [TraceRow(k.layer, k.path, k.rows, k.reason, n, notes[k]) for k, n in counts.items()]

    def total(
        self,
        path: Path | None = None,
        *,
        layer: str | None = None,
        rows: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Calls that match every filter given."""
        return sum(
            row.count
            for row in self.snapshot()
            if path in (None, row.path)
            and layer in (None, row.layer)
            and rows in (None, row.rows)
            and reason in (None, row.reason)
        )

    def __str__(self) -> str:
        """The table for people, one line for each path, rows and reason."""
        lines = (
            f"{row.path:<10} {row.rows:>7} rows {row.count:>8} calls  {row.layer}  {row.reason} {row.note}"
            for row in self.table()
        )
        experts = "\n".join(line.rstrip() for line in lines) or "no expert has been called"
        total = self.memory_total()
        read = [] if total is None else [memory_line(total)]
        return "\n".join([experts, *(f"compiled {row.layer}: {row.note}" for row in self.pieces()), *read])

    def table(self) -> list[TraceRow]:
        """The lines for people: layers merged, ``layer`` saying how many a line stands for."""
        merged: dict[tuple[Path, str, str], list[TraceRow]] = {}
        for row in self.snapshot():
            merged.setdefault((row.path, row.rows, row.reason), []).append(row)
        return [
            TraceRow(_layers(group), path, rows, reason, sum(r.count for r in group), group[0].note)
            for (path, rows, reason), group in merged.items()
        ]


def memory_line(row: MemoryRow) -> str:
    """What reading experts from files cost, for people."""
    return (
        f"expert memory of {row.layer}: {row.hit_rate:.1%} hits, {row.misses} experts read "
        f"({row.bytes_read / 1e9:.3f} GB), {row.stall:.3f} s waited"
    )


def _layers(group: list[TraceRow]) -> str:
    return group[0].layer if len(group) == 1 else f"{len(group)} layers"


trace = Trace()
# Linear layers are counted apart: there are several of them for each call of experts.
linear_trace = Trace()
