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

from mlx_experts.engine.kernels.activations import lookup
from mlx_experts.engine.kernels.expert_weights import ExpertWeights, SharedExpertWeights, Stack, global_factor
from mlx_experts.engine.kernels.naive import dequantised
from mlx_experts.engine.kernels.request import Decline, Projection

if TYPE_CHECKING:
    from types import ModuleType

# One parallel region at a time: numba's portable thread pool aborts the process on concurrent use.
_LOCK = threading.Lock()

# One start at a time: it changes the environment for as long as it lasts.
_STARTING = threading.Lock()

# Below this many bytes of weights a token, waking the other threads costs more than they save.
PARALLEL_FROM = 1 << 18


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernel, or None."""
    driver = _numba()
    return driver if isinstance(driver, Decline) else None


@lru_cache(maxsize=1)
def _numba() -> ModuleType | Decline:
    """``cpu_driver`` with its threads started, or why numba is not there or does not work."""
    try:
        import numba
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        return Decline("numba", "numba installed", "no numba", "pip install 'mlx-experts[cpu]'")
    except ImportError as error:  # numba refuses a NumPy that it does not know
        return _not_started(error, "Install a numba and a NumPy that belong together.")
    except ValueError as error:
        return _not_started(error, "Unset NUMBA_NUM_THREADS, or set it to 1 or more.")
    if numba.config.DISABLE_JIT:
        return Decline("numba", "numba that compiles", "NUMBA_DISABLE_JIT set", "Unset NUMBA_DISABLE_JIT.")
    from mlx_experts.engine.kernels.cpu import driver as cpu_driver

    try:
        with _STARTING:
            cpu_driver.start_threads()
    except ValueError as error:
        return _not_started(
            error,
            "Unset NUMBA_THREADING_LAYER and NUMBA_THREADING_LAYER_PRIORITY, or name a layer that is here.",
        )
    return cpu_driver


def _not_started(error: Exception, hint: str) -> Decline:
    """The Decline for what numba said at its start; its first line; further ones are its own advice."""
    return Decline("numba", "numba that starts", str(error).splitlines()[0].rstrip("."), hint)


def compiled() -> ModuleType:
    """``cpu_driver``, on a machine that ``unavailable`` has not turned away."""
    driver = _numba()
    assert not isinstance(driver, Decline)
    return driver


@lru_cache(maxsize=64)
def _rows_function(projection: Projection) -> Any:
    """The compiled product of rows; a plan, which calls it by its address, holds it too."""
    from mlx_experts.engine.kernels.cpu.rows import rows_product

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


def _held(*arrays: mx.array | None) -> list[mx.array]:
    """Second holders of arrays that were copied: MLX then puts a change in place elsewhere, as is noticed."""
    held = [a[...] for a in arrays if a is not None]
    mx.eval(held)
    return held


@dataclass(frozen=True, eq=False)
class _Plan:
    """One stack as the driver reads it, and what must stay alive while it may be called."""

    numbers: np.ndarray
    alive: tuple[Any, ...]


def _plan(stack: Stack) -> _Plan:
    """The numbers of ``cpu_driver``'s legend for one stack."""
    from mlx_experts.engine.kernels.cpu.rows import blocks_of

    p = stack.projection
    function = _rows_function(_kind(p))
    blocks = blocks_of(p)
    plane_scales = np.array(blocks.scales, np.float32)
    bias = _float32(stack.bias)
    factor = _float32(None if stack.global_scale is None else global_factor(stack.global_scale))
    planes = (stack.weight, stack.scales, stack.biases)
    row_bytes = [0 if a is None else a.itemsize * a.shape[-1] for a in planes]
    begins = [
        0 if a is None else address(a) + stack.first * n for a, n in zip(planes, row_bytes, strict=True)
    ]
    numbers = [
        function.address,
        *begins,
        bias.ctypes.data + stack.first * bias.itemsize if bias.size else 0,
        factor.ctypes.data if factor.size else 0,
        plane_scales.ctypes.data,
        p.rows,
        p.cols // blocks.weights,
        blocks.weights,
        *row_bytes[:2],
    ]
    copied = _held(stack.bias, stack.global_scale)
    return _Plan(np.array(numbers, np.int64), (function, plane_scales, bias, factor, *copied))


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where the arrays of one layer's experts, or of its shared expert, lie as compiled code reads them."""

    gated: bool
    gate: _Plan
    up: _Plan
    down: _Plan
    activation: Any
    constants: tuple[np.float32, np.float32]
    count: int
    bytes_each: int

    @classmethod
    def of(cls, experts: ExpertWeights) -> _Layout:
        up, down = _plan(experts.up), _plan(experts.down)
        activation = experts.activation
        count = experts.up.count
        return cls(
            gated=experts.gate is not None,
            gate=up if experts.gate is None else _plan(experts.gate),
            up=up,
            down=down,
            activation=_activation_function(activation.name),
            constants=(np.float32(activation.alpha), np.float32(activation.limit)),
            count=count,
            bytes_each=sum(a.nbytes for s in experts.stacks() for a in s.arrays()) // count,
        )

    def run(self, row: np.ndarray, chosen: np.ndarray, shares: np.ndarray, out: np.ndarray) -> None:
        """Fill ``out`` [H] from one token's row [H], its experts and their shares [K].

        Raises:
            IndexError: an index is not an expert.
        """
        driver = compiled()
        large = self.bytes_each * chosen.size >= PARALLEL_FROM
        with _LOCK:
            bad = (driver.parallel if large else driver.serial)(
                self.gated,
                self.gate.numbers,
                self.up.numbers,
                self.down.numbers,
                self.activation.address,
                *self.constants,
                self.count,
                row,
                chosen.view(np.int32),
                shares,
                out,
            )
        if bad >= 0:
            raise IndexError(f"expert {chosen[bad]} of {self.count}")


@dataclass(frozen=True, eq=False)
class _Shared:
    """A shared expert and the row whose sigmoid weighs it, if any."""

    layout: _Layout
    gate: np.ndarray | None
    gate_bias: float
    alive: tuple[mx.array, ...]

    @classmethod
    def of(cls, shared: SharedExpertWeights) -> _Shared:
        layout, stack = _Layout.of(shared.expert), shared.gate
        if stack is None:
            return cls(layout, None, 0.0, ())
        bias = 0.0 if stack.bias is None else float(_float32(stack.bias)[0])
        return cls(layout, _float32(dequantised(stack, 0)[0]), bias, tuple(_held(*stack.arrays())))

    def add(self, row: np.ndarray, out: np.ndarray) -> None:
        """Add the shared expert's output for one token's row to ``out`` [H]."""
        share = 1.0
        if self.gate is not None:
            with np.errstate(over="ignore"):  # exp of a large number: the sigmoid is zero
                share = 1.0 / (1.0 + np.exp(-(np.dot(self.gate, row) + np.float32(self.gate_bias))))
        part = _fresh(out.shape)
        self.layout.run(row, _FIRST, np.array([share], np.float32), part)
        out += part


_FIRST = np.zeros(1, np.uint32)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Everything that is read of one layer, and whether it still lies there."""

    arrays: tuple[mx.array, ...]
    addresses: tuple[int, ...]
    routed: _Layout
    shared: _Shared | None

    @classmethod
    def of(cls, experts: ExpertWeights) -> _Layer:
        arrays = tuple(_arrays(experts))
        shared = None if experts.shared is None else _Shared.of(experts.shared)
        return cls(arrays, tuple(map(address, arrays)), _Layout.of(experts), shared)

    def moved(self) -> bool:
        """Whether an array was changed in place and lies elsewhere since."""
        return tuple(map(address, self.arrays)) != self.addresses


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
    """One layer's experts, ready for one token at a time."""

    def __init__(self, experts: ExpertWeights) -> None:
        self._experts = experts
        self._layer = _Layer.of(experts)

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array | Decline:
        """See ``FusedRun``; a Decline inside a function transformation, which has no values to read.

        Raises:
            IndexError: an index is not an expert.
        """
        # Casts to the dtype that an array has already cost nothing; each real one is an operation.
        inputs = (x.astype(mx.float32), indices.astype(mx.uint32), weights.astype(mx.float32))
        if not evaluated(*inputs):
            return TRANSFORMED
        layer = self._layer
        if layer.moved():
            layer = self._layer = _Layer.of(self._experts)
        row, chosen, shares = (np.ascontiguousarray(np.array(a, copy=False)).reshape(-1) for a in inputs)
        out = _fresh(x.shape)
        layer.routed.run(row, chosen, shares, out.reshape(-1))
        if layer.shared is not None:
            layer.shared.add(row, out.reshape(-1))
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


def prepare(experts: ExpertWeights, dtype: mx.Dtype) -> FusedExperts | Decline:
    """See ``FusedKernel``; the kernel is the same for every activation dtype."""
    arrays = _arrays(experts)
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
