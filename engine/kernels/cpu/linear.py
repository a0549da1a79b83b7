"""A linear layer on the CPU, straight from its stored weights, for any number of rows.

MLX 0.32 multiplies packed weights on one thread at 0.3 GB/s in float32 and at 0.03 GB/s in bfloat16, with
sums in the dtype of the activations. Here sums are float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.cpu import stacks, start
from mlx_experts.engine.kernels.cpu.stacks import addresses
from mlx_experts.engine.kernels.expert_weights import Stack
from mlx_experts.engine.kernels.request import Activations, Decline

unavailable = start.unavailable


class FusedLinear:
    """One matrix ``[N, M]``, ready for any number of rows.

    Args:
        stack: a stack of one, evaluated and without gaps.
        activations: what inputs are multiplied as, where the format has both.
    """

    def __init__(self, stack: Stack, activations: Activations = "float32") -> None:
        self._activations = activations
        self._stack, self.arrays = stack, tuple(stack.arrays())
        self.nbytes = sum(a.nbytes for a in self.arrays)
        # What MLX's product takes its dtype from; the floating-point formats keep their scales as bytes.
        held = stack.weight if stack.scales is None else stack.scales
        self._typed = held if mx.issubdtype(held.dtype, mx.floating) else None
        self._place()

    def _place(self) -> None:
        self._addresses = addresses(self.arrays)
        self._plan = stacks.plan(self._stack, self._activations)
        self._steps: dict[int, Any] = {}  # by rows

    def _stay(self) -> None:
        """Read the arrays where they lie now."""
        if addresses(self.arrays) != self._addresses:
            self._place()

    @property
    def plan(self) -> stacks.Plan:
        """The matrix as compiled code reads it."""
        self._stay()
        return self._plan

    @property
    def columns(self) -> int:
        """M."""
        return self._stack.projection.cols

    def __call__(self, x: mx.array) -> mx.array | Decline:
        """``x W^T + bias`` for ``x`` ``[..., M]``, in the dtype of MLX's product, rounded once.

        A Decline inside a function transformation, which has no values to read.
        """
        wide = x.astype(mx.float32)
        if not stacks.evaluated(wide):
            return stacks.TRANSFORMED
        rows = stacks.rows_of(wide) if x.size else np.empty((0, x.shape[-1]), np.float32)
        out = self.on_rows(rows).reshape(*x.shape[:-1], self._stack.projection.rows)
        dtype = x.dtype if self._typed is None else mx.result_type(x, self._typed)
        return mx.array(out).astype(dtype)

    def on_rows(self, rows: np.ndarray) -> np.ndarray:
        """The same for float32 rows [R, M] in memory, to float32 [R, N]."""
        self._stay()
        out = stacks.fresh((len(rows), self._stack.projection.rows))
        if len(rows):
            self.fill(rows, out)
        return out

    def fill(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out`` [R, N] from float32 rows [R, M]."""
        driver, plan = start.compiled(), self._plan
        large = self.nbytes * len(rows) >= start.PARALLEL_FROM
        if len(rows) <= (driver.FEW if not plan.on_unit else 1):
            self._few(rows, out)
        elif plan.on_unit:
            parts = start.shares() if large else 1
            start.run(linear_on_unit(), large, plan.numbers, stacks.tile_shapes(), parts, rows, out)
        else:
            parts = start.parts() if large else 1
            start.run(driver.linear, large, plan.numbers, stacks.dot_function().address, parts, rows, out)

    def _few(self, rows: np.ndarray, out: np.ndarray) -> None:
        """As :meth:`fill` for a few rows, straight from the packed weights."""
        count = len(rows)
        made = self._steps.get(count)
        if made is None:
            from mlx_experts.engine.kernels.cpu.steps import StepList

            steps, width = StepList(self.nbytes * count), self.columns
            inputs, places = steps.lay_out(0, width, (self._plan,), count)
            made = steps, inputs, steps.multiply((self._plan,), places, (0,), count)
            self._steps[count] = made
        steps, inputs, outputs = made
        with start.LOCK:
            inputs[0], outputs[5] = (a.__array_interface__["data"][0] for a in (rows, out))
            steps.run()


def linear_on_unit() -> Any:
    """The computation on a processor's matrix unit."""
    from mlx_experts.engine.kernels.cpu import unit

    return unit.linear_on_unit


def prepare(stack: Stack, activations: Activations = "float32") -> FusedLinear | Decline:
    """The kernel for one matrix, or why its arrays cannot be read."""
    arrays = stack.arrays()
    if not stacks.evaluated(*arrays):
        return stacks.TRANSFORMED  # the weights themselves are being differentiated
    if not all(memoryview(a).c_contiguous for a in arrays):  # type: ignore[arg-type]
        return Decline(
            "contiguous",
            "weights without gaps",
            "a view into a larger array",
            "Make the weights contiguous when loading.",
        )
    return FusedLinear(stack, activations)
