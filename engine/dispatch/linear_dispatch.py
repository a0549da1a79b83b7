"""Chooses the path of a linear layer on the CPU: the kernel where its gate accepts, else MLX's product.

As for experts, the choice is made once for each kind of call and kept until an array of the layer is
replaced. The first kernel of each kind is compared with the float32 truth before it is trusted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_experts.engine.dispatch import eligibility, policy
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.trace import Tally, TraceKey, linear_trace, rows_label
from mlx_experts.engine.dispatch.verify import INT8_BOUND, judged
from mlx_experts.engine.kernels import naive
from mlx_experts.engine.kernels.cpu import stacks
from mlx_experts.engine.kernels.expert_weights import ARRAY_NAMES, Stack, dtype_name, read_dense
from mlx_experts.engine.kernels.request import Activations, Decline, Projection

if TYPE_CHECKING:
    from mlx_experts.engine.kernels.cpu.linear import FusedLinear

_ONE_ROW = (rows_label(1), mx.float32, False)  # the kind of a call of one float32 row, not in training
# A wrong kernel is off by about the length of the output; a right one by rounding.
_BOUNDS = {mx.float32: 1e-4, mx.bfloat16: 1e-2, mx.float16: 1e-2}
_COMPARED = 256  # outputs that are compared at either end of a matrix


@dataclass(frozen=True, eq=False)
class _Decision:
    """What one kind of call does; ``run`` None leaves it to MLX."""

    run: FusedLinear | None
    tally: Tally


@dataclass(frozen=True, eq=False)
class _Decided:
    """The decisions for the arrays that a layer has now."""

    arrays: tuple[Any, ...]
    by_kind: dict[tuple[object, ...], _Decision]


class LinearDispatch:
    """One linear layer's products, on whichever path fits the call.

    A plain object: it owns no parameter, and is empty again when it is copied or pickled.

    Args:
        layer: the layer's module path, for the trace.
        fused: the argument of ``load``; None leaves the choice to the environment.
        activations: likewise.
    """

    def __init__(self, layer: str, fused: bool | None = None, activations: str | None = None) -> None:
        self.layer, self.fused, self.activations = layer, fused, activations
        self._decided = _Decided((), {})

    def __reduce__(self) -> tuple[type[LinearDispatch], tuple[str, bool | None, str | None]]:
        return type(self), (self.layer, self.fused, self.activations)

    def fresh(self) -> LinearDispatch:
        """As this one, with nothing decided."""
        return type(self)(self.layer, self.fused, self.activations)

    def __call__(self, module: nn.Module, x: mx.array) -> mx.array | None:
        """``x W^T + bias`` for ``x`` [..., M], or None where the product is MLX's.

        Args:
            module: the layer, or an embedding that serves as one.

        Raises:
            SettingError: a setting in the environment cannot be read.
        """
        device = current_device()
        if device != "cpu":
            return None
        by_kind, rows = self._standing(module), prod(x.shape[:-1])
        kind = (rows_label(rows), x.dtype, module.training)
        decision = by_kind.get(kind)
        if decision is None:
            decision = by_kind[kind] = self._decide(module, x, rows)
        if decision.run is not None:
            y = decision.run(x)
            if not isinstance(y, Decline):
                decision.tally.add()
                return y
            decision = by_kind.setdefault((*kind, y.rule), self._left(rows, y))
        decision.tally.add()
        return None

    def on_row(self, module: nn.Module, row: np.ndarray) -> np.ndarray | None:
        """As the call on the CPU for one float32 row [1, M] in memory, to float32 [1, N].

        None, and not counted, where the call has to be made: it decides, or leaves the product to MLX.
        """
        found = self.decided(module)
        if found is None:
            return None
        run, tally = found
        y = run.on_rows(row)
        tally.add()
        return y

    def decided(self, module: nn.Module) -> tuple[FusedLinear, Tally] | None:
        """What multiplies one float32 row and what counts it; None where it is not decided, or is MLX."""
        decision = None if module.training else self._standing(module).get(_ONE_ROW)
        return None if decision is None or decision.run is None else (decision.run, decision.tally)

    def _standing(self, module: nn.Module) -> dict[tuple[object, ...], _Decision]:
        """The decisions for the arrays that the layer has now."""
        decided, arrays = self._decided, tuple(map(module.get, ARRAY_NAMES))
        if len(decided.arrays) != len(arrays) or not all(map(is_, arrays, decided.arrays)):
            decided = self._decided = _Decided(arrays, {})
        return decided.by_kind

    def _left(self, rows: int, why: Decline) -> _Decision:
        key = TraceKey(self.layer, "mlx", rows_label(rows), why.rule)
        return _Decision(None, linear_trace.tally(key, f"{why}. {why.hint}"))

    def _decide(self, module: nn.Module, x: mx.array, rows: int) -> _Decision:
        stack = read_dense(module)
        request = eligibility.linear_request(
            None if stack is None else stack.projection,
            rows=rows,
            dtype=dtype_name(x.dtype),
            device="cpu",
            training=module.training,
        )
        verdict = eligibility.check_linear(request, policy.resolve("cpu", self.fused))
        if isinstance(verdict, Decline):
            return self._left(rows, verdict)
        assert stack is not None  # an adapted layer is declined
        activations = policy.activations(self.activations)
        run = _prepared(stack, x, activations)
        if isinstance(run, Decline):
            return self._left(rows, run)
        why = stacks.int8_declines(stack, activations)
        by = "cpu" if activations == "float32" or why is not None else f"cpu {activations}"
        note = "" if why is None else f"{why}. {why.hint}"
        return _Decision(run, linear_trace.tally(TraceKey(self.layer, "fused", rows_label(rows), by), note))


def _prepared(stack: Stack, x: mx.array, activations: Activations) -> FusedLinear | Decline:
    """The kernel for one layer, compared with the truth once for each kind of layer."""
    from mlx_experts.engine.kernels.cpu import linear

    run = linear.unavailable() or linear.prepare(stack, activations)
    if isinstance(run, Decline):
        return run
    one = prod(x.shape[:-1]) == 1
    tried, key = _tried(), (replace(stack.projection, rows=0), x.dtype, one, activations)
    verdict = tried.get(key)
    if verdict is None:
        verdict = _compare(run, stack, x, activations)
        if verdict is None:
            return run  # not kept: the next layer of this kind may be tried
        tried[key] = verdict
    return verdict if isinstance(verdict, Decline) else run


@functools.cache
def _tried() -> dict[tuple[Projection, mx.Dtype, bool, Activations], Literal["agrees"] | Decline]:
    return {}


def _compare(
    run: FusedLinear, stack: Stack, x: mx.array, activations: Activations
) -> Literal["agrees"] | Decline | None:
    """Both ends of the output against the truth; None where there are no values or no numbers."""
    rows = 1 if prod(x.shape[:-1]) == 1 else 5
    p = stack.projection
    token = mx.random.normal((rows, p.cols), key=mx.random.key(0)).astype(x.dtype)
    got = run(token)
    if isinstance(got, Decline):
        return None
    count = min(p.rows, _COMPARED)
    wide, pairs = token.astype(mx.float32), []
    for first in (0, p.rows - count):
        part = replace(stack, projection=replace(p, rows=count), first=stack.first + first)
        pairs.append((got[:, first : first + count].astype(mx.float32), naive.linear_in_float32(part, wide)))
    distance = mx.linalg.norm(mx.concatenate([a - b for a, b in pairs]))
    length = mx.linalg.norm(mx.concatenate([b for _, b in pairs]))
    mx.eval(distance, length)
    if not mx.isfinite(length).item():
        return None
    error = cast(float, (distance / mx.maximum(length, 1e-20)).item())
    bound = max(_BOUNDS[x.dtype], INT8_BOUND if activations == "int8" else 0.0)
    found = f"a relative distance of {error:.1e} to the truth"
    kernel, instead = "The CPU's kernel for linear layers", "MLX's products are used instead"
    return judged(error, bound, found, kernel, instead)
