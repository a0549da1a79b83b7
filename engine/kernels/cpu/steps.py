"""Several computations for one token in one call: all threads go through a list of steps together.

A step is a part (see ``numba_forms``), its context and the number of its tasks. Each thread takes the next
task that nobody has taken, and goes on to the next step when all tasks of this one are done. A thread waits
only for tasks that another one is computing, so it does not matter how many threads there are or when they
come: one thread alone does everything.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlx_experts.engine.kernels.cpu import driver, start, token
from mlx_experts.engine.kernels.cpu.intrinsics import (
    bits,
    call_loop,
    call_part,
    count_now,
    counted_up,
    number,
    packed,
    unpacked,
)
from mlx_experts.engine.kernels.cpu.numba_forms import Forms, Part

if TYPE_CHECKING:
    from mlx_experts.engine.kernels.cpu.experts import Layout
    from mlx_experts.engine.kernels.cpu.stacks import Plan

STEP = 3  # numbers of a step: the addresses of a part and of a context, and how many tasks
COUNTERS = 16  # numbers of a step's counters: of tasks taken and of tasks done, a cache line each
MATRIX = 5  # numbers of a matrix in ``multiplied``: stack, input, its sums, output, its first task
_LINE = 64  # bytes
PATIENCE = 2000  # looks at a counter before another thread of the machine is let in


def _through(index, context):  # type: ignore[no-untyped-def]
    """One thread's way through all steps."""
    steps, count, counters, give_way = unpacked(context, 4)
    for s in range(count):
        step, taken = steps + s * STEP * 8, counters + s * COUNTERS * 8
        part, of, tasks, done = number(step, 0), number(step, 1), number(step, 2), taken + COUNTERS * 4
        task = counted_up(taken)
        while task < tasks:
            call_part(part, task, of)
            counted_up(done)
            task = counted_up(taken)
        looks = 0
        while count_now(done) < tasks:
            looks += 1
            if looks > PATIENCE and give_way != 0:
                call_part(give_way, 0, 0)


def _run(  # type: ignore[no-untyped-def]
    loop,
    through,
    multiplied,
    hidden,
    output,
    normed,
    turned,
    routed,
    steps,
    count,
    counters,
    give_way,
    threads,
):
    call_loop(loop, through, threads, packed(steps, count, counters, give_way))


def _multiplied(task, context):  # type: ignore[no-untyped-def]
    """Some rows of one of several matrices times its inputs."""
    inputs, at = number(context, 1), context + 16 + (number(context, 0) - 1) * MATRIX * 8
    while number(at, 4) > task:
        at -= MATRIX * 8
    stack, first = number(at, 0), (task - number(at, 4)) * driver.ROWS_AT_ONCE
    rows, blocks = number(stack, driver.ROWS), number(stack, driver.BLOCKS)
    count = min(driver.ROWS_AT_ONCE, rows - first)
    for r in range(inputs):
        x = number(at, 1) + r * blocks * number(stack, driver.WEIGHTS) * 4
        out = number(at, 3) + (r * rows + first) * 4
        driver.expert_rows(stack, 0, first, count, x, number(at, 2) + r * 8 * blocks, out)


MULTIPLIED = Part(_multiplied)
steps = Forms(
    _run, _through, MULTIPLIED, driver.HIDDEN, driver.OUTPUT, token.NORMED, token.TURNED, token.ROUTED
)


@lru_cache(maxsize=1)
def _give_way() -> int:
    """The address of what lets another thread of the machine run, or 0."""
    if os.name != "posix":
        return 0
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class StepList:
    """Steps that are made once, with rooms for what lies between them.

    Args:
        nbytes: of the weights that a run reads.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.alive: list[Any] = []
        self._steps: list[tuple[int, np.ndarray, int]] = []
        self._where: tuple[int, ...] | None = None

    def room(self, count: int, kind: Any = np.float32) -> np.ndarray:
        """Zeros that begin at a cache line."""
        size = np.dtype(kind).itemsize
        held = np.zeros(count * size + _LINE, np.uint8)
        skipped = -held.ctypes.data % _LINE
        made = held[skipped : skipped + count * size].view(kind)
        self.alive.append(made)
        return made

    def step(self, part: Part, context: Iterable[int], tasks: int) -> np.ndarray:
        """Add a step; its context, in which a number may be replaced between two runs."""
        made = np.array(list(context), np.int64)
        self._steps.append((part.address, made, tasks))
        return made

    def lay_out(
        self,
        x: int,
        width: int,
        plans: Sequence[Plan],
        rows: int = 1,
        added: tuple[int, int] = (0, 0),
        norm: tuple[int, int, int] | None = None,
        out: int = 0,
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """A step that lays rows out for these matrices: its context; where each finds its inputs, and sums.

        Args:
            x: the address of float32 rows [rows, width].
            added: the addresses of what is added to a row before, and of the sum; 0 for none.
            norm: the address of its weight, and the bits of its centre and epsilon.
            out: receives the row behind the norm.
        """
        found: dict[Any, tuple[int, int]] = {}
        matrices: list[int] = []
        for plan in plans:
            key = _taken_as(plan)
            if key not in found:
                planes, sums = self.room(rows * width), self.room(rows * 2 * int(plan.numbers[driver.BLOCKS]))
                found[key] = planes.ctypes.data, sums.ctypes.data
                matrices += [plan.numbers.ctypes.data, *found[key]]
        held = np.array(matrices, np.int64)
        self.alive += [held, *plans]
        normed = (0, 0, 0, 0) if norm is None else (1, *norm)
        context = (x, *added, *normed, width, out, held.ctypes.data, len(found))
        return self.step(token.NORMED, context, rows), [found[_taken_as(plan)] for plan in plans]

    def multiply(
        self, plans: Sequence[Plan], places: Sequence[tuple[int, int]], outputs: Sequence[int], rows: int = 1
    ) -> np.ndarray:
        """A step that multiplies inputs with matrices; its context.

        Args:
            places: of each matrix's inputs, as :meth:`lay_out` gives them.
            outputs: the address of each one's [rows, N].
        """
        context, tasks = [len(plans), rows], 0
        for plan, place, out in zip(plans, places, outputs, strict=True):
            context += [plan.numbers.ctypes.data, *place, out, tasks]
            tasks += -(-int(plan.numbers[driver.ROWS]) // driver.ROWS_AT_ONCE)
        self.alive += plans
        return self.step(MULTIPLIED, context, tasks)

    def run_experts(self, layout: Layout, inputs: Sequence[tuple[int, int]], top_k: int, h: int) -> Experts:
        """The steps of one token's experts, whose inputs for up and gate are laid out."""
        up, gate, down = (plan.numbers.ctypes.data for plan in (layout.up, layout.gate, layout.down))
        f = int(layout.up.numbers[driver.ROWS])
        tasks, at_once = -(-f // driver.ROWS_AT_ONCE), start.outputs_at_once(h)
        chosen, shares, out = self.room(top_k, np.int32), self.room(top_k), self.room(h)
        hidden = self.room(top_k * f)
        sums = self.room(2 * top_k * int(layout.down.numbers[driver.BLOCKS]))
        between = (hidden.ctypes.data, sums.ctypes.data)
        constants = (layout.activation.address, *map(bits, layout.constants))
        given = (*constants, tasks, chosen.ctypes.data, *inputs[0], *inputs[1], *between)
        self.step(driver.HIDDEN, (int(layout.gated), gate, up, down, *given), top_k * tasks)
        picked = (chosen.ctypes.data, shares.ctypes.data)
        context = (down, f, h, top_k, *picked, *between, out.ctypes.data, at_once)
        self.step(driver.OUTPUT, context, -(-h // at_once))
        self.alive.append(layout)
        return Experts(chosen, shares, out)

    def run(self) -> None:
        """Go through all steps; ``start.LOCK`` is held."""
        if self._where is None:
            self._list = np.array([(part, of.ctypes.data, n) for part, of, n in self._steps], np.int64)
            self._counters = self.room(len(self._steps) * COUNTERS, np.int64)
            addresses = self._list.ctypes.data, len(self._steps), self._counters.ctypes.data
            self._where = (*addresses, _give_way())
        self._counters.fill(0)
        large = self._nbytes >= start.PARALLEL_FROM
        start.run_alone(steps, large, *self._where, start.shares() if large else 1)


class Experts(NamedTuple):
    """Where one token's experts [K], their shares [K] and the sum [H] are."""

    chosen: np.ndarray
    shares: np.ndarray
    out: np.ndarray


def _taken_as(plan: Plan) -> tuple[Any, ...]:
    """What an input is laid out by: equal for matrices that take it alike."""
    n = plan.numbers
    scales = ctypes.string_at(int(n[driver.PLANE_SCALES]), 4 * int(n[driver.WEIGHTS]))
    return int(n[driver.QUANTISE]), int(n[driver.WEIGHTS]), int(n[driver.BLOCKS]), scales
