"""The fused expert computation on the CPU, straight from the packed weights, compiled by numba.

``cpu_rows`` knows the storage formats; this file knows the order of the work: rows of gate and up in
parallel, the activation, rows of down in parallel, the weighted sum over experts, all in float32. Each output
is summed in one fixed order, so repeated runs are bitwise equal whatever the threads do.
Legend: E experts, K experts of this token, H model width, F expert width.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.activations import lookup
from mlx_experts.engine.kernels.facts import Decline, Projection
from mlx_experts.engine.kernels.pack import PackedExperts, Stack, global_factor

if TYPE_CHECKING:
    from types import ModuleType

# One parallel region at a time: numba's portable thread pool aborts the process on concurrent use.
_LOCK = threading.Lock()

# Below this many bytes of weights a token, waking the other threads costs more than they save.
PARALLEL_FROM = 1 << 18


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernel, or None."""
    if _numba() is None:
        return Decline("numba", "numba installed", "no numba", "pip install 'mlx-experts[cpu]'")
    return None


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    try:
        from mlx_experts.engine.kernels import cpu_driver
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        return None
    return cpu_driver


def compiled() -> ModuleType:
    """``cpu_driver``, on a machine that ``unavailable`` has not turned away."""
    driver = _numba()
    assert driver is not None
    return driver


@lru_cache(maxsize=64)
def _rows_function(projection: Projection) -> Any:
    """The compiled product of rows; kept for ever because kernels hold its address."""
    from mlx_experts.engine.kernels.cpu_rows import rows_product

    return rows_product(projection)


def _kind(projection: Projection) -> Projection:
    """The part of a projection that the compiled code depends on."""
    return replace(projection, rows=0, cols=0, bias=False, global_scale=False)


def address(array: mx.array) -> int:
    """Where the data of an evaluated array without gaps lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def _float32(array: mx.array | None) -> np.ndarray:
    """A small array as float32; empty for None."""
    if array is None:
        return np.empty(0, np.float32)
    return np.ascontiguousarray(np.array(array.astype(mx.float32)))


@dataclass(frozen=True, eq=False)
class _Plan:
    """One stack as the driver reads it, and what must stay alive while it may be called."""

    numbers: np.ndarray
    alive: tuple[Any, ...]


def _plan(stack: Stack) -> _Plan:
    """The numbers of ``cpu_driver``'s legend for one stack."""
    from mlx_experts.engine.kernels.cpu_rows import blocks_of

    p = stack.projection
    function = _rows_function(_kind(p))
    blocks = blocks_of(p)
    plane_scales = np.array(blocks.scales, np.float32)
    bias = _float32(stack.bias)
    factor = _float32(None if stack.global_scale is None else global_factor(stack.global_scale))
    numbers = [
        function.address,
        address(stack.weight),
        0 if stack.scales is None else address(stack.scales),
        0 if stack.biases is None else address(stack.biases),
        bias.ctypes.data if bias.size else 0,
        factor.ctypes.data if factor.size else 0,
        plane_scales.ctypes.data,
        p.rows,
        p.cols // blocks.weights,
        blocks.weights,
        stack.weight.itemsize * stack.weight.shape[2],
        0 if stack.scales is None else stack.scales.itemsize * stack.scales.shape[2],
    ]
    # A second holder of what was copied above makes MLX put a change in place elsewhere, which is noticed.
    copied = [a[...] for a in (stack.bias, stack.global_scale) if a is not None]
    mx.eval(copied)
    return _Plan(np.array(numbers, np.int64), (function, plane_scales, bias, factor, *copied))


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where the arrays of one layer lie, as compiled code reads them."""

    arrays: tuple[mx.array, ...]
    addresses: tuple[int, ...]
    gate: _Plan
    up: _Plan
    down: _Plan

    @classmethod
    def of(cls, experts: PackedExperts) -> _Layout:
        arrays = tuple(a for s in experts.stacks() for a in s.arrays())
        up, down = _plan(experts.up), _plan(experts.down)
        gate = up if experts.gate is None else _plan(experts.gate)
        return cls(arrays, tuple(map(address, arrays)), gate, up, down)

    def moved(self) -> bool:
        """Whether an array was changed in place and lies elsewhere since."""
        return tuple(map(address, self.arrays)) != self.addresses


@lru_cache(maxsize=64)
def _activation_function(name: str) -> Any:
    """The compiled scalar form of an activation; kept because kernels hold its address."""
    from numba import cfunc, types

    form = lookup(name).scalar
    assert form is not None  # the gate has looked
    return cfunc(types.float32(*[types.float32] * 4), error_model="numpy")(form)


class FusedExperts:
    """One layer's experts, ready for one token at a time."""

    def __init__(self, experts: PackedExperts) -> None:
        self._experts = experts
        self._layout = _Layout.of(experts)
        self._function = _activation_function(experts.activation.name)
        self._constants = (np.float32(experts.activation.alpha), np.float32(experts.activation.limit))
        self._num_experts = experts.up.weight.shape[0]
        self._bytes_per_expert = sum(a.nbytes for a in self._layout.arrays) // self._num_experts

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array | Decline:
        """See ``FusedRun``; a Decline inside a function transformation, which has no values to read.

        Raises:
            IndexError: an index is not an expert.
        """
        # Casts to the dtype that an array has already cost nothing; each real one is an operation.
        inputs = (x.astype(mx.float32), indices.astype(mx.uint32), weights.astype(mx.float32))
        if not evaluated(*inputs):
            return TRANSFORMED
        layout = self._layout
        if layout.moved():
            layout = self._layout = _Layout.of(self._experts)
        row, chosen, shares = (np.ascontiguousarray(np.array(a, copy=False)).reshape(-1) for a in inputs)
        out = _fresh(x.shape)
        driver = compiled()
        large = self._bytes_per_expert * chosen.size >= PARALLEL_FROM
        with _LOCK:
            bad = (driver.parallel if large else driver.serial)(
                self._experts.gate is not None,
                layout.gate.numbers,
                layout.up.numbers,
                layout.down.numbers,
                self._function.address,
                *self._constants,
                self._num_experts,
                row,
                chosen.view(np.int32),
                shares,
                out.reshape(-1),
            )
        if bad >= 0:
            raise IndexError(f"expert {chosen[bad]} of {self._num_experts}")
        return mx.array(out).astype(x.dtype)


TRANSFORMED = Decline(
    "transformation",
    "a call outside compile, grad and vmap",
    "a call inside one",
    "The CPU kernel reads values; leave the experts out of the transformed function.",
)


def _fresh(shape: tuple[int, ...]) -> np.ndarray:
    """Room for the output; tests fill it with NaN."""
    return np.empty(shape, np.float32)


def evaluated(*arrays: mx.array) -> bool:
    """Compute the arrays, or say False when MLX is only tracing them."""
    try:
        mx.async_eval(*arrays)
    except ValueError as error:
        if "graph transformation" not in str(error):
            raise
        return False
    mx.eval(*arrays)
    return True


def prepare(experts: PackedExperts, dtype: mx.Dtype) -> FusedExperts | Decline:
    """See ``FusedKernel``; the kernel is the same for every activation dtype."""
    arrays = [a for s in experts.stacks() for a in s.arrays()]
    if not evaluated(*arrays):
        return TRANSFORMED  # the weights themselves are being differentiated
    if not all(memoryview(a).c_contiguous for a in arrays):  # type: ignore[arg-type]
        return Decline(
            "contiguous",
            "weights without gaps",
            "a view into a larger array",
            "Make the stacks contiguous when loading.",
        )
    return FusedExperts(experts)
