"""A usual decoder layer for one float32 row: everything around its matrices and in them, in one call.

The call goes through a list of steps (``steps``) that is made once, of the addresses of the layer's arrays
and of rooms for what is between two steps. Legend: D model width, h query heads, g key-value heads, d head
width, e width of a value, E experts, K experts of a token.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.cpu import driver, stacks, start, token
from mlx_experts.engine.kernels.cpu.experts import Layout
from mlx_experts.engine.kernels.cpu.linear import FusedLinear
from mlx_experts.engine.kernels.cpu.numba_forms import Part, bits
from mlx_experts.engine.kernels.cpu.router import Routed
from mlx_experts.engine.kernels.cpu.stacks import Plan
from mlx_experts.engine.kernels.cpu.steps import COUNTERS, MULTIPLIED, steps
from mlx_experts.engine.kernels.cpu.token import NORMED, ROUTED, TURNED

_LINE = 64  # bytes
CachePlace = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square norm; ``weight`` None stands for none at all, as heads may have."""

    weight: mx.array | None
    centre: np.float32
    eps: np.float32


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """What a layer's attention is made of, and the norms before it and behind it."""

    before: Norm
    q: FusedLinear
    k: FusedLinear
    v: FusedLinear
    q_norm: Norm
    k_norm: Norm
    o: FusedLinear
    behind: Norm
    heads: int
    groups: int
    width: int
    depth: int
    scale: np.float32


@dataclass(frozen=True, eq=False)
class ExpertParts:
    """What a layer's routed experts are made of; ``bias`` is the router's for the selection."""

    matrix: FusedLinear
    routed: Routed
    bias: mx.array | None
    layout: Layout
    arrays: tuple[mx.array, ...]


@lru_cache(maxsize=1)
def _give_way() -> int:
    """The address of what lets another thread of the machine run, or 0."""
    if os.name != "posix":
        return 0
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class LayerCall:
    """One layer's call, until one of its arrays is replaced or moved.

    Args:
        attention: everything up to the norm behind the first residual.
        experts: what follows; None where the caller computes that.
        turned: by how many angles a head is turned.
        pairs: whether neighbours are turned together.
    """

    def __init__(
        self, attention: AttentionParts, experts: ExpertParts | None, turned: int, pairs: bool
    ) -> None:
        self.experts = experts
        self._alive: list[Any] = [attention]
        self._arrays: list[mx.array] = []
        self._steps: list[tuple[int, np.ndarray, int]] = []
        self._bytes, width = 0, attention.q.columns
        self._x, self._total, self._out = (self._room(width) for _ in range(3))
        self._cos, self._sin = self._room(turned), self._room(turned)
        self._attend(attention, pairs)
        inputs = () if experts is None else (experts.matrix.plan, experts.layout.up, experts.layout.gate)
        self._normed = self._room(width)
        places = self._lay_out(self._x, inputs, self._normed, attention.behind, self._branch)
        if experts is not None:
            self._run_experts(experts, places)
        self._list = np.array([(part, of.ctypes.data, n) for part, of, n in self._steps], np.int64)
        self._counters = self._room(len(self._steps) * COUNTERS, np.int64)
        self._large = self._bytes >= start.PARALLEL_FROM
        threads = start.shares() if self._large else 1
        addresses = self._list.ctypes.data, len(self._steps), self._counters.ctypes.data
        self._call = (self._large, *addresses, _give_way(), threads)
        self._places = stacks.addresses(self._arrays)

    @property
    def stands(self) -> bool:
        """Whether every array lies where it lay."""
        return stacks.addresses(self._arrays) == self._places

    def __call__(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, cache: CachePlace) -> np.ndarray:
        """A row [1, D] to the row behind the layer; its keys and values are written into the cache.

        Args:
            cos: of the position's angles, and ``sin`` likewise.
            cache: where its keys [g, rows, d] and its values [g, rows, e] lie, ``rows``, and the position.

        Returns:
            [1, D]; without experts [2, D]: the residual, and that through the norm.
        """
        turn, seen = self._turn, self._seen
        keys, values, rows, position = cache
        with start.LOCK:
            self._x[...], self._cos[...], self._sin[...] = x[0], cos, sin
            turn[3], turn[5], turn[9], turn[10] = cache
            seen[1], seen[2], seen[4], seen[5] = keys, values, position + 1, rows
            self._counters.fill(0)
            start.run_alone(steps, *self._call)
            if self.experts is None:
                return np.stack((self._total, self._normed))
            return (self._total + self._out)[None]

    def _room(self, count: int, kind: Any = np.float32) -> np.ndarray:
        """Zeros that begin at a cache line."""
        size = np.dtype(kind).itemsize
        held = np.zeros(count * size + _LINE, np.uint8)
        skipped = -held.ctypes.data % _LINE
        made = held[skipped : skipped + count * size].view(kind)
        self._alive.append(made)
        return made

    def _step(self, part: Part, context: Iterable[int], tasks: int) -> np.ndarray:
        """Add a step; its context."""
        made = np.array(list(context), np.int64)
        self._steps.append((part.address, made, tasks))
        return made

    def _vector(self, array: mx.array | None) -> int:
        """Where a vector lies as float32; 0 for none."""
        if array is None or not array.size:
            return 0
        self._arrays.append(array)
        if array.dtype == mx.float32:
            return stacks.address(array)
        wide = stacks.float32(array)
        # A second holder: a change in place then puts the array elsewhere, as is noticed.
        self._alive += [wide, *stacks.held(array)]
        return int(wide.ctypes.data)

    def _norm(self, norm: Norm) -> tuple[int, int, int]:
        return self._vector(norm.weight), bits(norm.centre), bits(norm.eps)

    def _lay_out(
        self,
        x: np.ndarray,
        plans: Sequence[Plan],
        out: np.ndarray | None = None,
        norm: Norm | None = None,
        branch: np.ndarray | None = None,
    ) -> list[tuple[int, int]]:
        """A step that lays a row out for these matrices: where each finds its input, and the sums of it.

        Args:
            out: receives the row behind ``norm``, where there is one.
            branch: what is added to the row before that.
        """
        found: dict[Any, tuple[int, int]] = {}
        matrices: list[int] = []
        for plan in plans:
            key = _taken_as(plan)
            if key not in found:
                rooms = self._room(x.size), self._room(2 * int(plan.numbers[driver.BLOCKS]))
                found[key] = rooms[0].ctypes.data, rooms[1].ctypes.data
                matrices += [plan.numbers.ctypes.data, *found[key]]
        held = np.array(matrices, np.int64)
        self._alive += [held, *plans]
        added = (0, 0) if branch is None else (branch.ctypes.data, self._total.ctypes.data)
        normed = (0, 0, 0, 0) if norm is None else (1, *self._norm(norm))
        to = 0 if out is None else out.ctypes.data
        last = (x.size, to, held.ctypes.data, len(found))
        self._step(NORMED, (x.ctypes.data, *added, *normed, *last), 1)
        return [found[_taken_as(plan)] for plan in plans]

    def _multiply(
        self, linears: Sequence[FusedLinear], places: Sequence[tuple[int, int]]
    ) -> list[np.ndarray]:
        """A step that multiplies inputs with matrices; its outputs."""
        context, tasks, made = [len(linears)], 0, []
        for linear, place in zip(linears, places, strict=True):
            rows = int(linear.plan.numbers[driver.ROWS])
            out = self._room(rows)
            context += [linear.plan.numbers.ctypes.data, *place, out.ctypes.data, tasks]
            tasks += -(-rows // driver.ROWS_AT_ONCE)
            made.append(out)
            self._arrays += linear.arrays
            self._bytes += linear.nbytes
        self._step(MULTIPLIED, context, tasks)
        return made

    def _attend(self, a: AttentionParts, pairs: bool) -> None:
        """The steps up to the output projection, whose output is ``_branch``."""
        normed, matrices = self._room(a.q.columns), (a.q, a.k, a.v)
        places = self._lay_out(self._x, [m.plan for m in matrices], normed, a.before)
        q, k, v = self._multiply(matrices, places)
        queries, seen = self._room(a.heads * a.width), self._room(a.heads * a.depth)
        at = [each.ctypes.data for each in (q, queries, k, v, seen, self._cos, self._sin)]
        shape = (a.heads, a.width, a.depth, 0, 0)
        norms = (*self._norm(a.q_norm), *self._norm(a.k_norm))
        turn = (at[0], at[1], at[2], 0, at[3], 0, *shape, *norms, at[5], at[6], self._cos.size, int(pairs))
        self._turn = self._step(TURNED, turn, a.heads + a.groups)
        share = a.heads // a.groups
        context = (at[1], 0, 0, share, 0, 0, a.width, a.depth, bits(a.scale), at[4])
        self._seen = self._step(token.attend.parts[0], context, a.heads)
        (self._branch,) = self._multiply((a.o,), self._lay_out(seen, (a.o.plan,)))

    def _run_experts(self, e: ExpertParts, places: Sequence[tuple[int, int]]) -> None:
        """The steps from the router to the sum over the experts."""
        layout = e.layout
        (logits,) = self._multiply((e.matrix,), places[:1])
        top_k = e.routed.top_k
        chosen, shares = self._room(top_k, np.uint32), self._room(top_k)
        tilt = self._vector(e.bias)
        picked = (chosen.ctypes.data, shares.ctypes.data)
        self._step(ROUTED, (logits.ctypes.data, logits.size, tilt, *e.routed.how, top_k, *picked), 1)
        up, gate, down = (plan.numbers.ctypes.data for plan in (layout.up, layout.gate, layout.down))
        f, h = int(layout.up.numbers[driver.ROWS]), self._x.size
        tasks = -(-f // driver.ROWS_AT_ONCE)
        hidden = self._room(top_k * f)
        sums = self._room(2 * top_k * int(layout.down.numbers[driver.BLOCKS]))
        between = (hidden.ctypes.data, sums.ctypes.data)
        constants = (layout.activation.address, *map(bits, layout.constants))
        inputs = (*places[1], *places[2], *between)
        first, second = driver.one_token.parts
        context = (int(layout.gated), gate, up, down, *constants, tasks, chosen.ctypes.data, *inputs)
        self._step(first, context, top_k * tasks)
        at_once = start.outputs_at_once(h)
        context = (down, f, h, top_k, *picked, *between, self._out.ctypes.data, at_once)
        self._step(second, context, -(-h // at_once))
        self._arrays += e.arrays
        self._bytes += layout.bytes_each * top_k
        self._alive.append(layout)


def _taken_as(plan: Plan) -> tuple[Any, ...]:
    """What an input is laid out by: equal for matrices that take it alike."""
    n = plan.numbers
    scales = ctypes.string_at(int(n[driver.PLANE_SCALES]), 4 * int(n[driver.WEIGHTS]))
    return int(n[driver.QUANTISE]), int(n[driver.WEIGHTS]), int(n[driver.BLOCKS]), scales
