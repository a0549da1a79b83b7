"""Several computations for one token in one call: all threads go through a list of steps together.

A step is a part (see ``numba_forms``), its context and the number of its tasks. Each thread takes the next
task that nobody has taken, and goes on to the next step when all tasks of this one are done. A thread waits
only for tasks that another one is computing, so it does not matter how many threads there are or when they
come: one thread alone does everything.
"""

from __future__ import annotations

from mlx_experts.engine.kernels.cpu import driver
from mlx_experts.engine.kernels.cpu.numba_forms import (
    Forms,
    as_float,
    call_loop,
    call_part,
    count_now,
    counted_up,
    number,
    packed,
    read,
    unpacked,
    write,
)
from mlx_experts.engine.kernels.cpu.token import added, norm_row, route_row, turned_row

STEP = 3  # numbers of a step: the addresses of a part and of a context, and how many tasks
COUNTERS = 16  # numbers of a step's counters: of tasks taken and of tasks done, a cache line each
MATRIX = 5  # numbers of a matrix in ``multiplied``: stack, input, its sums, output, its first task
LAID_OUT = 3  # numbers of a matrix for which an input is laid out: stack, input, its sums
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
    loop, through, normed, multiplied, turned, routed, steps, count, counters, give_way, threads
):
    call_loop(loop, through, threads, packed(steps, count, counters, give_way))


def _normed(task, context):  # type: ignore[no-untyped-def]
    """A row, or its sum with a branch, through a norm where there is one, and laid out for some matrices."""
    x, branch, total, norm, weight, centre, eps, width, out, matrices, count = unpacked(context, 11)
    values = x
    if branch != 0:
        added(x, branch, width, total)
        values = total
    if norm != 0:
        norm_row(values, width, weight, as_float(centre), as_float(eps), out)
        values = out
    for i in range(count):
        at = matrices + i * LAID_OUT * 8
        driver.lay_out(number(at, 0), values, 0, width, number(at, 1), number(at, 2))


def _multiplied(task, context):  # type: ignore[no-untyped-def]
    """Some rows of one of several matrices times its input."""
    at = context + 8 + (number(context, 0) - 1) * MATRIX * 8
    while number(at, 4) > task:
        at -= MATRIX * 8
    stack, first = number(at, 0), (task - number(at, 4)) * driver.ROWS_AT_ONCE
    count = min(driver.ROWS_AT_ONCE, number(stack, driver.ROWS) - first)
    driver.expert_rows(stack, 0, first, count, number(at, 1), number(at, 2), number(at, 3) + first * 4)


def _turned(task, context):  # type: ignore[no-untyped-def]
    """One head of the queries; behind those one of the keys and of the values, to the cache."""
    (
        q, queries, k, keys, v, values, heads, width, depth, rows, position, q_weight, q_centre, q_eps,
        k_weight, k_centre, k_eps, cos, sin, half, pairs,
    ) = unpacked(context, 21)  # fmt: skip
    if task < heads:
        x, out = q + task * width * 4, queries + task * width * 4
        turned_row(x, width, q_weight, as_float(q_centre), as_float(q_eps), cos, sin, half, pairs, out)
    else:
        g = task - heads
        at = g * rows + position
        x, out = k + g * width * 4, keys + at * width * 4
        turned_row(x, width, k_weight, as_float(k_centre), as_float(k_eps), cos, sin, half, pairs, out)
        for i in range(depth):
            write(values, at * depth + i, read(v, g * depth + i))


def _routed(task, context):  # type: ignore[no-untyped-def]
    """The experts of a token and their shares."""
    (
        logits, count, bias, score, groups, keep, best_two, normalise, eps, scale, top_k, chosen, share,
    ) = unpacked(context, 13)  # fmt: skip
    route_row(
        logits, count, bias, score, groups, keep, best_two, normalise, as_float(eps), as_float(scale), top_k,
        chosen, share,
    )  # fmt: skip


steps = Forms(_run, _through, _normed, _multiplied, _turned, _routed)
THROUGH, NORMED, MULTIPLIED, TURNED, ROUTED = range(5)
"""The parts of ``steps`` in their order."""
