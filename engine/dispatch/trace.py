"""Counts which path every expert call took and why; always on.

Equal text does not prove that a kernel ran, so the counts are what tests and people look at. Layers that the
trace does not know have never been called.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Path = Literal["fused", "grouped", "dequantized", "gather", "mlx"]


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

    __slots__ = ("_trace", "count", "key", "note")

    def __init__(self, trace: Trace, key: TraceKey, note: str) -> None:
        self._trace, self.key, self.note, self.count = trace, key, note, 0

    def add(self) -> None:
        """Count one call."""
        with self._trace.lock:
            if not self.count:
                self._trace.tallies.append(self)
            self.count += 1


class Trace:
    """Counts of expert calls by layer, path, rows and reason, safe to use from several threads.

    What counts is a :class:`Tally`, made once for each decision, so that a call costs a lock and an addition.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Those that have counted since the last reset, in the order of their first calls.
        self.tallies: list[Tally] = []

    def tally(self, key: TraceKey, note: str = "") -> Tally:
        """What counts the calls of one decision. Calls of equal keys are one line, with the first's note."""
        return Tally(self, key, note)

    def reset(self) -> None:
        """Forget every count."""
        with self.lock:
            for tally in self.tallies:
                tally.count = 0
            self.tallies.clear()

    def snapshot(self) -> list[TraceRow]:
        """The lines as they stand, in the order in which they first occurred."""
        with self.lock:
            counted = [(tally.key, tally.count, tally.note) for tally in self.tallies]
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
        return "\n".join(line.rstrip() for line in lines) or "no expert has been called"

    def table(self) -> list[TraceRow]:
        """The lines for people: layers merged, ``layer`` saying how many a line stands for."""
        merged: dict[tuple[Path, str, str], list[TraceRow]] = {}
        for row in self.snapshot():
            merged.setdefault((row.path, row.rows, row.reason), []).append(row)
        return [
            TraceRow(_layers(group), path, rows, reason, sum(r.count for r in group), group[0].note)
            for (path, rows, reason), group in merged.items()
        ]


def _layers(group: list[TraceRow]) -> str:
    return group[0].layer if len(group) == 1 else f"{len(group)} layers"


trace = Trace()
# Linear layers are counted apart: there are several of them for each call of experts.
linear_trace = Trace()
