"""Several computations for one token in one call: all threads go through a list of steps together.

A step is a part (see ``numba_forms``), its context and the number of its tasks. Each thread takes the next
task that nobody has taken, and goes on to the next step when all tasks of this one are done. A thread waits
only for tasks that another one is computing, so it does not matter how many threads there are or when they
come: one thread alone does everything.
"""

from __future__ import annotations

from mlx_experts.engine.kernels.cpu import driver, token
from mlx_experts.engine.kernels.cpu.numba_forms import (
    Forms,
    Part,
    call_loop,
    call_part,
    count_now,
    counted_up,
    number,
    packed,
    unpacked,
)

STEP = 3  # numbers of a step: the addresses of a part and of a context, and how many tasks
COUNTERS = 16  # numbers of a step's counters: of tasks taken and of tasks done, a cache line each
MATRIX = 5  # numbers of a matrix in ``multiplied``: stack, input, its sums, output, its first task
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
    loop, through, multiplied, normed, turned, routed, steps, count, counters, give_way, threads
):
    call_loop(loop, through, threads, packed(steps, count, counters, give_way))


def _multiplied(task, context):  # type: ignore[no-untyped-def]
    """Some rows of one of several matrices times its input."""
    at = context + 8 + (number(context, 0) - 1) * MATRIX * 8
    while number(at, 4) > task:
        at -= MATRIX * 8
    stack, first = number(at, 0), (task - number(at, 4)) * driver.ROWS_AT_ONCE
    count = min(driver.ROWS_AT_ONCE, number(stack, driver.ROWS) - first)
    driver.expert_rows(stack, 0, first, count, number(at, 1), number(at, 2), number(at, 3) + first * 4)


MULTIPLIED = Part(_multiplied)
steps = Forms(_run, _through, MULTIPLIED, token.NORMED, token.TURNED, token.ROUTED)
