"""What keeping experts in files costs: hits, misses, bytes read and the time that calls waited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryRow:
    """The account of one layer, or of several together.

    Args:
        layer: the layer's module path, or how many layers.
        calls: calls that looked for experts.
        hits: experts that a call found in memory; each counts once a call.
        misses: experts that were read.
        bytes_read: bytes that were read for them.
        stall: seconds that calls waited for reads.
    """

    layer: str
    calls: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    stall: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of experts that were found in memory; 0 where none was asked for."""
        return self.hits / max(self.hits + self.misses, 1)


class MemoryAccount:
    """Counts for one layer, safe to use from several threads.

    Args:
        layer: the layer's module path.
        counted: told at the first call after each reset.
    """

    def __init__(self, layer: str, counted: Callable[[MemoryAccount], None]) -> None:
        self._lock, self._row, self._counted = threading.Lock(), MemoryRow(layer), counted

    def add(self, hits: int, misses: int, bytes_read: int, stall: float) -> None:
        """Count one call."""
        with self._lock:
            row = self._row
            if not row.calls:
                self._counted(self)
            self._row = MemoryRow(
                row.layer,
                row.calls + 1,
                row.hits + hits,
                row.misses + misses,
                row.bytes_read + bytes_read,
                row.stall + stall,
            )

    def reset(self) -> None:
        """Forget every count."""
        with self._lock:
            self._row = MemoryRow(self._row.layer)

    @property
    def row(self) -> MemoryRow:
        """The counts as they stand."""
        return self._row


def together(rows: list[MemoryRow]) -> MemoryRow:
    """The counts of several layers as one."""
    return MemoryRow(
        rows[0].layer if len(rows) == 1 else f"{len(rows)} layers",
        sum(row.calls for row in rows),
        sum(row.hits for row in rows),
        sum(row.misses for row in rows),
        sum(row.bytes_read for row in rows),
        sum(row.stall for row in rows),
    )
