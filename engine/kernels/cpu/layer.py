"""A usual decoder layer for one float32 row: everything around its matrices and in them, in one call.

The call goes through a list of steps (``steps``) that is made once, of the addresses of the layer's arrays
and of rooms for what is between two steps. Legend: D model width, h query heads, g key-value heads, d head
width, e width of a value, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.cpu import driver, stacks, start, token
from mlx_experts.engine.kernels.cpu.experts import Layout
from mlx_experts.engine.kernels.cpu.intrinsics import bits
from mlx_experts.engine.kernels.cpu.linear import FusedLinear
from mlx_experts.engine.kernels.cpu.router import Routed
from mlx_experts.engine.kernels.cpu.steps import StepList

_NO_PLANS: tuple[stacks.Plan, ...] = ()
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
        linears = [attention.q, attention.k, attention.v, attention.o]
        nbytes, inputs = 0, _NO_PLANS
        if experts is not None:
            linears.append(experts.matrix)
            inputs = (experts.matrix.plan, experts.layout.up, experts.layout.gate)
            nbytes = experts.layout.bytes_each * experts.routed.top_k
        self._arrays = [array for each in linears for array in each.arrays]
        self._steps = steps = StepList(nbytes + sum(each.nbytes for each in linears))
        steps.alive.append(attention)
        width = attention.q.columns
        self._x, self._total, self._normed = (steps.room(width) for _ in range(3))
        self._cos, self._sin = steps.room(turned), steps.room(turned)
        added = (self._attend(attention, pairs).ctypes.data, self._total.ctypes.data)
        norm, out = self._norm(attention.behind), self._normed.ctypes.data
        _, places = steps.lay_out(self._x.ctypes.data, width, inputs, added=added, norm=norm, out=out)
        if experts is not None:
            self._run_experts(experts, places)
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
            self._steps.run()
            if self.experts is None:
                return np.stack((self._total, self._normed))
            return (self._total + self._out)[None]

    def _vector(self, array: mx.array | None) -> int:
        """Where a vector lies as float32; 0 for none."""
        if array is None or not array.size:
            return 0
        self._arrays.append(array)
        if array.dtype == mx.float32:
            return stacks.address(array)
        wide = stacks.float32(array)
        # A second holder: a change in place then puts the array elsewhere, as is noticed.
        self._steps.alive += [wide, *stacks.held(array)]
        return int(wide.ctypes.data)

    def _norm(self, norm: Norm) -> tuple[int, int, int]:
        return self._vector(norm.weight), bits(norm.centre), bits(norm.eps)

    def _multiply(
        self, linears: Sequence[FusedLinear], places: Sequence[tuple[int, int]]
    ) -> list[np.ndarray]:
        """A step that multiplies inputs with matrices; its outputs."""
        made = [self._steps.room(int(each.plan.numbers[driver.ROWS])) for each in linears]
        self._steps.multiply([each.plan for each in linears], places, [out.ctypes.data for out in made])
        return made

    def _attend(self, a: AttentionParts, pairs: bool) -> np.ndarray:
        """The steps up to the output projection, and its output."""
        steps, matrices, x = self._steps, (a.q, a.k, a.v), self._x.ctypes.data
        plans, out = [each.plan for each in matrices], steps.room(a.q.columns).ctypes.data
        _, places = steps.lay_out(x, a.q.columns, plans, norm=self._norm(a.before), out=out)
        q, k, v = self._multiply(matrices, places)
        queries, seen = steps.room(a.heads * a.width), steps.room(a.heads * a.depth)
        at = [each.ctypes.data for each in (q, queries, k, v, seen, self._cos, self._sin)]
        shape = (a.heads, a.width, a.depth, 0, 0)
        norms = (*self._norm(a.q_norm), *self._norm(a.k_norm))
        turn = (at[0], at[1], at[2], 0, at[3], 0, *shape, *norms, at[5], at[6], self._cos.size, int(pairs))
        self._turn = steps.step(token.TURNED, turn, a.heads + a.groups)
        share = a.heads // a.groups
        context = (at[1], 0, 0, share, 0, 0, a.width, a.depth, bits(a.scale), at[4])
        self._seen = steps.step(token.attend.parts[0], context, a.heads)
        _, places = steps.lay_out(seen.ctypes.data, seen.size, (a.o.plan,))
        return self._multiply((a.o,), places)[0]

    def _run_experts(self, e: ExpertParts, places: Sequence[tuple[int, int]]) -> None:
        """The steps from the router to the sum over the experts."""
        steps, top_k = self._steps, e.routed.top_k
        (logits,) = self._multiply((e.matrix,), places[:1])
        context = (logits.ctypes.data, logits.size, self._vector(e.bias), *e.routed.how, top_k, 0, 0)
        route = steps.step(token.ROUTED, context, 1)
        into = steps.run_experts(e.layout, places[1:], top_k, self._x.size)
        route[-2:] = into.chosen.ctypes.data, into.shares.ctypes.data
        self._out = into.out
        self._arrays += e.arrays
