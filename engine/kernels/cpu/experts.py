"""The fused expert computation on the CPU, straight from the packed weights, compiled by numba.

``rows`` and ``tiles`` know the storage formats, ``driver`` the order of the work: rows of gate and up in
parallel, the activation, rows of down in parallel, the weighted sum over experts, all in float32. Each output
is summed in one fixed order, so repeated runs are bitwise equal whatever the threads do.
Legend: T tokens, E experts, K experts of a token, H model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.activations import lookup
from mlx_experts.engine.kernels.cpu import stacks, start
from mlx_experts.engine.kernels.cpu.stacks import Plan, addresses
from mlx_experts.engine.kernels.expert_weights import ExpertWeights, SharedExpertWeights
from mlx_experts.engine.kernels.naive import dequantised
from mlx_experts.engine.kernels.request import Activations, Decline

unavailable = start.unavailable

# Tokens that the matrix unit takes at once: an input is kept six bytes a number for each of its experts.
_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the arrays of one layer's experts, or of its shared expert, lie as compiled code reads them."""

    gated: bool
    gate: Plan
    up: Plan
    down: Plan
    activation: Any
    constants: tuple[np.float32, np.float32]
    count: int
    bytes_each: int
    order: np.ndarray
    _steps: dict[int, Any] = field(default_factory=dict)  # of one token, by its experts

    @classmethod
    def of(cls, experts: ExpertWeights, activations: Activations) -> Layout:
        up, down = (stacks.plan(stack, activations) for stack in (experts.up, experts.down))
        activation = experts.activation
        count = experts.up.count
        return cls(
            gated=experts.gate is not None,
            gate=up if experts.gate is None else stacks.plan(experts.gate, activations),
            up=up,
            down=down,
            activation=_activation_function(activation.name),
            constants=(np.float32(activation.alpha), np.float32(activation.limit)),
            count=count,
            bytes_each=sum(a.nbytes for s in experts.stacks() for a in s.arrays()) // count,
            order=np.arange(count),
        )

    def run(
        self,
        x: np.ndarray,
        chosen: np.ndarray,
        shares: np.ndarray,
        out: np.ndarray,
        turn: np.ndarray | None = None,
        some_left: bool = False,
    ) -> None:
        """Fill ``out`` [T, H] from the tokens' rows [T, H], their experts and their shares [T, K].

        Args:
            turn: the experts in the order in which several tokens' sums add them; None for their own.
            some_left: add to ``out``, where -1 stands for an expert that another run adds.

        Raises:
            IndexError: an index is not an expert.
        """
        chosen = chosen.view(np.int32)
        if len(x) == 1:
            self._one(x[0], chosen[0], shares[0], out[0])
            return
        driver = start.compiled()
        large = self.bytes_each * chosen.size >= start.PARALLEL_FROM
        matrices = (self.gated, self.gate.numbers, self.up.numbers, self.down.numbers)
        layer = (*matrices, self.activation.address, *self.constants, self.count)
        if not some_left:
            out[...] = 0
        order = (self.order if turn is None else turn, some_left)
        if all(plan.on_unit for plan in (self.gate, self.up, self.down)):
            how = (stacks.tile_shapes(), start.shares() if large else 1, *order)
            bad = self._on_unit(large, (*layer, *how), x, chosen, shares, out)
        else:
            how = (stacks.dot_function().address, start.parts() if large else 1, *order)
            bad = start.run(driver.many_tokens, large, *layer, *how, x, chosen, shares, out)
        if bad >= 0:
            raise IndexError(f"expert {chosen.reshape(-1)[bad]} of {self.count}")

    def _one(self, x: np.ndarray, chosen: np.ndarray, shares: np.ndarray, out: np.ndarray) -> None:
        """As :meth:`run` for one token, in vectors."""
        # As numbers without a sign, those below zero are large.
        if np.maximum.reduce(chosen.view(np.uint32)) >= self.count:
            wrong = next(e for e in chosen.tolist() if not 0 <= e < self.count)
            raise IndexError(f"expert {wrong} of {self.count}")
        made = self._steps.get(chosen.size)
        if made is None:
            from mlx_experts.engine.kernels.cpu.steps import StepList

            steps = StepList(self.bytes_each * chosen.size)
            inputs, places = steps.lay_out(0, x.size, (self.up, self.gate))
            made = steps, inputs, steps.run_experts(self, places, chosen.size, x.size)
            self._steps[chosen.size] = made
        steps, inputs, into = made
        with start.LOCK:
            inputs[0], into.chosen[...], into.shares[...] = x.__array_interface__["data"][0], chosen, shares
            steps.run()
            out[...] = into.out

    def _on_unit(
        self,
        large: bool,
        layer: tuple[Any, ...],
        x: np.ndarray,
        chosen: np.ndarray,
        shares: np.ndarray,
        out: np.ndarray,
    ) -> int:
        """Some tokens at a time on the matrix unit; -1, or where the first index is that is no expert."""
        from mlx_experts.engine.kernels.cpu import unit

        for first in range(0, len(x), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            some = (x[part], chosen[part], shares[part], out[part])
            bad = int(start.run(unit.experts_on_unit, large, *layer, *some))
            if bad >= 0:
                return bad + first * chosen.shape[1]
        return -1


@dataclass(frozen=True, eq=False)
class _Shared:
    """A shared expert and the row whose sigmoid weighs it, if any."""

    layout: Layout
    gate: np.ndarray | None
    gate_bias: float
    alive: tuple[mx.array, ...]

    @classmethod
    def of(cls, shared: SharedExpertWeights, activations: Activations) -> _Shared:
        layout, stack = Layout.of(shared.expert, activations), shared.gate
        if stack is None:
            return cls(layout, None, 0.0, ())
        bias = 0.0 if stack.bias is None else float(stacks.float32(stack.bias)[0])
        return cls(
            layout, stacks.float32(dequantised(stack, 0)[0]), bias, tuple(stacks.held(*stack.arrays()))
        )

    def add(self, x: np.ndarray, out: np.ndarray) -> None:
        """Add the shared expert's output for the tokens' rows [T, H] to ``out`` [T, H]."""
        shares = np.ones((len(x), 1), np.float32)
        if self.gate is not None:
            with np.errstate(over="ignore"):  # exp of a large number: the sigmoid is zero
                shares[:, 0] = 1.0 / (1.0 + np.exp(-(x @ self.gate + np.float32(self.gate_bias))))
        part = stacks.fresh(out.shape)
        self.layout.run(x, np.zeros((len(x), 1), np.uint32), shares, part)
        out += part


@dataclass(frozen=True, eq=False)
class _Layer:
    """Everything that is read of one layer, and where it lay then."""

    arrays: tuple[mx.array, ...]
    addresses: tuple[int, ...]
    routed: Layout
    shared: _Shared | None

    @classmethod
    def of(cls, experts: ExpertWeights, activations: Activations) -> _Layer:
        arrays = tuple(_arrays(experts))
        shared = None if experts.shared is None else _Shared.of(experts.shared, activations)
        return cls(arrays, addresses(arrays), Layout.of(experts, activations), shared)


def _arrays(experts: ExpertWeights) -> list[mx.array]:
    stacks = [*experts.stacks(), *(experts.shared.stacks() if experts.shared is not None else [])]
    return [a for s in stacks for a in s.arrays()]


@lru_cache(maxsize=64)
def _activation_function(name: str) -> Any:
    """The compiled scalar form of an activation; a layout, which calls it by its address, holds it too."""
    from numba import cfunc, types

    form = lookup(name).scalar
    assert form is not None  # the gate has looked
    return cfunc(types.float32(*[types.float32] * 4), error_model="numpy")(form)


class FusedExperts:
    """One layer's experts, ready for any number of tokens."""

    def __init__(self, experts: ExpertWeights, activations: Activations = "float32") -> None:
        self._experts, self._activations = experts, activations
        self._layer = _Layer.of(experts, activations)

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array | Decline:
        """See ``FusedRun``; a Decline inside a function transformation, which has no values to read.

        Raises:
            IndexError: an index is not an expert.
        """
        # Casts to the dtype that an array has already cost nothing; each real one is an operation.
        inputs = (x.astype(mx.float32), indices.astype(mx.uint32), weights.astype(mx.float32))
        if not stacks.evaluated(*inputs):
            return stacks.TRANSFORMED
        out = self.on_rows(*map(stacks.rows_of, inputs))
        return mx.array(out.reshape(x.shape)).astype(x.dtype)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Every array that is read."""
        return self._layer.arrays

    @property
    def alone(self) -> Layout | None:
        """The routed experts as compiled code reads them, where these are all and every one is in memory."""
        layer = self._placed()
        return layer.routed if layer.shared is None and self._experts.slots is None else None

    def _placed(self) -> _Layer:
        """The layer where its arrays lie now."""
        layer = self._layer
        if addresses(layer.arrays) != layer.addresses:  # one was changed in place
            layer = self._layer = _Layer.of(self._experts, self._activations)
        return layer

    def on_rows(self, rows: np.ndarray, chosen: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """The same in memory: float32 rows [T, H], uint32 experts and float32 shares [T, K], to [T, H].

        Raises:
            IndexError: an index is not an expert.
        """
        layer = self._placed()
        out = stacks.fresh(rows.shape)
        slots = self._experts.slots
        if slots is None:
            layer.routed.run(rows, chosen, shares, out)
        else:
            with slots.lock:
                out[...] = 0
                for part in slots.parts(chosen):
                    layer.routed.run(rows, part.slots, shares, out, part.turn, not part.alone)
        if layer.shared is not None:
            layer.shared.add(rows, out)
        return out


def int8_declines(experts: ExpertWeights) -> Decline | None:
    """Why some of these stacks take float32 inputs although 8-bit ones are asked for, or None."""
    return next(filter(None, (stacks.int8_declines(s, "int8") for s in experts.stacks())), None)


def prepare(
    experts: ExpertWeights, dtype: mx.Dtype, activations: Activations = "float32"
) -> FusedExperts | Decline:
    """See ``FusedKernel``; the kernel is the same for every activation dtype.

    Args:
        activations: what inputs are multiplied as, where the format has both.
    """
    arrays = _arrays(experts)
    if not stacks.evaluated(*arrays):
        return stacks.TRANSFORMED  # the weights themselves are being differentiated
    if not all(memoryview(a).c_contiguous for a in arrays):  # type: ignore[arg-type]
        return Decline(
            "contiguous",
            "weights without gaps",
            "a view into a larger array",
            "Make the stacks contiguous when loading.",
        )
    return FusedExperts(experts, activations)
