"""Chooses the path of every expert call: fused where its gate accepts, a path for many rows, or gathered.

The choice is made once for each kind of call on a layer's weights and kept until a projection or one of its
arrays is replaced (by quantising, by an adapter, by loading). A block hands over modules that it has bound;
the hot path compares what MLX's own leaves hold, calls the path and counts the call. It reads no environment
and no file. Threads that meet at a first call may each decide; the last decision stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_experts.engine.dispatch import eligibility, policy, tuning_cache, verify
from mlx_experts.engine.dispatch.policy import Policy
from mlx_experts.engine.dispatch.trace import Tally, TraceKey, rows_label, trace
from mlx_experts.engine.kernels import FusedRun, expert_weights, fused_kernel, gather, many_rows_kernel
from mlx_experts.engine.kernels.cpu import experts as cpu_experts
from mlx_experts.engine.kernels.cpu.experts import FusedExperts
from mlx_experts.engine.kernels.expert_weights import SharedModules
from mlx_experts.engine.kernels.request import (
    Accept,
    Activation,
    Activations,
    Decline,
    Device,
    KernelRequest,
    Verdict,
)
from mlx_experts.plugins.manager import components

_FLOAT32 = mx.float32
# Tokens on which the path for many rows is tried.
_TRIED_ROWS = 24


@lru_cache(maxsize=1)
def _gpu() -> Device:
    return "metal" if mx.metal.is_available() else "cuda"


def current_device() -> Device:
    """The device that operations of this thread run on now."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else _gpu()


InMemory = tuple[FusedExperts, Tally]
"""What gives the whole sum of a float32 row in memory on the CPU, and what counts the call."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What one kind of call does.

    Args:
        run: the fused kernel, or None for gathered products.
        tally: counts the calls.
        adds_shared: the kernel adds the shared expert.
        unrounded: the kernel gives float32 where a shared expert is still to be added.
    """

    run: FusedRun | None
    tally: Tally
    adds_shared: bool = False
    unrounded: bool = False

    @cached_property
    def in_memory(self) -> tuple[InMemory | None, InMemory | None]:
        """What sums a row in memory: where there is a shared expert, and where there is none."""
        if not isinstance(self.run, FusedExperts):
            return None, None
        whole = self.run, self.tally
        return (whole if self.adds_shared else None), whole


class _Decided(NamedTuple):
    """The decisions for one state of a layer's weights.

    They are kept with that state and replaced together with it, so that a decision which one thread makes
    while another replaces the weights is never found beside the new ones.
    """

    held: expert_weights.Held
    by_kind: dict[tuple[object, ...], Decision]


def _shared(
    request: KernelRequest, asked: Policy, modules: SharedModules, dtype: mx.Dtype
) -> expert_weights.SharedExpertWeights | Decline:
    """The shared expert for the kernel that takes this request, or why it is added apart."""
    packed = expert_weights.read_shared(*modules)
    read = (
        None if packed is None else expert_weights.shared_request(packed, dtype=dtype, device=request.device)
    )
    verdict = eligibility.check_shared(request, read, asked)
    if isinstance(verdict, Decline):
        return verdict
    assert packed is not None
    return packed


def in_slots(run: FusedRun, experts: expert_weights.ExpertWeights) -> FusedRun:
    """A kernel that reads slots as one that is given experts by their numbers."""
    slots = experts.slots
    if slots is None:
        return run

    def placed(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array | Decline:
        numbers = np.array(indices)
        if (count := np.unique(numbers).size) > slots.slots:
            return Decline(
                "expert memory",
                f"at most {slots.slots} experts in a call",
                str(count),
                "They run through gathered products, some at a time; a larger budget has more slots.",
            )
        with slots.lock:
            part = next(slots.parts(numbers))
            return run(x, mx.array(part.slots.astype(np.uint32)), weights)

    return placed


class ExpertDispatch:
    """One layer's routed experts, on whichever path fits the call.

    A plain object: it owns no parameter, is rebuilt empty when copied or pickled, and may be used from
    several threads.

    Args:
        layer: the layer's module path, for the trace.
        activation: the activation between the projections.
        fused: the argument of ``load``; None leaves the choice to the environment.
        activations: likewise, what the CPU's kernel multiplies activations as.
    """

    def __init__(
        self, layer: str, activation: Activation, fused: bool | None = None, activations: str | None = None
    ) -> None:
        self.layer, self.activation, self.fused, self.activations = layer, activation, fused, activations
        self._bound: BoundExperts | None = None

    def __reduce__(self) -> tuple[type[ExpertDispatch], tuple[str, Activation, bool | None, str | None]]:
        return type(self), (self.layer, self.activation, self.fused, self.activations)

    def fresh(self, **changes: Any) -> ExpertDispatch:
        """As this one with nothing decided, and some arguments changed."""
        given = {"fused": self.fused, "activations": self.activations, **changes}
        return type(self)(self.layer, self.activation, **given)

    def __call__(self, container: nn.Module, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``sum_k weights[k] * down_k(act(gate_k x, up_k x))`` for every row.

        Args:
            container: an expert container of mlx-lm (``gate_proj, up_proj, down_proj`` or ``fc1, fc2``).
            x: ``[..., H]``.
            indices: ``[..., K]`` integers below E, in any order.
            weights: ``[..., K]`` float32.

        Returns:
            ``[..., H]`` in the dtype of ``x``: summed in float32 and rounded once.

        Raises:
            SettingError: a setting in the environment cannot be read.
        """
        bound = self._bound
        if bound is None or bound.container is not container:
            bound = self._bound = self.bind(container)
        return bound(x, indices, weights, current_device())[0]

    def bind(self, container: nn.Module, shared: SharedModules | None = None) -> BoundExperts:
        """The calls for one container, and the shared expert that the launches may add."""
        return BoundExperts(self, container, shared)

    def decide(
        self,
        container: nn.Module,
        x: mx.array,
        rows: int,
        top_k: int,
        device: Device,
        shared: SharedModules | None,
    ) -> Decision:
        """What a kind of call does from now on; see :class:`BoundExperts`."""
        experts = expert_weights.read(container, self.activation)
        request = expert_weights.request_of(
            experts,
            self.activation,
            rows=rows,
            top_k=top_k,
            dtype=x.dtype,
            device=device,
            training=container.training,
        )
        asked = policy.resolve(device, self.fused, tuned=tuning_cache.bound(device))
        offered, said = self._registered(request, asked, experts, container, x)
        decision = offered or self._own(request, asked, experts, container, x, shared)
        if (
            shared is not None
            and decision.run is not None
            and not (decision.adds_shared or decision.unrounded)
        ):
            # Both are still to be added, so the sum must come unrounded.
            decision = self._unrounded(decision, container, x, rows, top_k, device, shared)
        if not said:
            return decision
        note = "; ".join(filter(None, (decision.tally.note, *said)))
        return replace(decision, tally=trace.tally(decision.tally.key, note))

    def _unrounded(
        self,
        decision: Decision,
        container: nn.Module,
        x: mx.array,
        rows: int,
        top_k: int,
        device: Device,
        shared: SharedModules,
    ) -> Decision:
        """What a kind of call does in float32, given that its kernel leaves the shared expert out."""
        if x.dtype == mx.float32:
            return decision
        wide = self.decide(container, x.astype(mx.float32), rows, top_k, device, shared)
        run = wide.run
        if run is None:
            return wide

        def widened(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array | Decline:
            y = run(x.astype(mx.float32), indices, weights)
            return y.astype(x.dtype) if wide.adds_shared and not isinstance(y, Decline) else y

        return replace(wide, run=widened)

    def _own(
        self,
        request: KernelRequest,
        asked: Policy,
        experts: expert_weights.ExpertWeights | None,
        container: nn.Module,
        x: mx.array,
        shared: SharedModules | None,
    ) -> Decision:
        """The back-end's own kernel where its gate accepts, else gathered products."""
        device = request.device
        verdict: Verdict = eligibility.check(request, asked)
        if isinstance(verdict, Accept):
            assert experts is not None  # an adapted container is declined
            kernel = fused_kernel(device)
            added = None if shared is None else _shared(request, asked, shared, x.dtype)
            if isinstance(added, expert_weights.SharedExpertWeights):
                experts = replace(experts, shared=added)
                shared_request = expert_weights.shared_request(added, dtype=x.dtype, device=device)
                request = replace(request, shared=shared_request)
            activations = policy.activations(self.activations) if device == "cpu" else "float32"
            run: FusedRun | Decline | None = kernel.unavailable()
            if run is None and activations == "int8":
                run = cpu_experts.prepare(experts, x.dtype, activations)
            elif run is None:
                run = kernel.prepare(experts, x.dtype)
            if not isinstance(run, Decline) and device != "cpu":
                run = in_slots(run, experts)
            if not isinstance(run, Decline):
                run = verify.verify_kernel(device, run, request, container, x, experts.shared, activations)
            if not isinstance(run, Decline):
                return self._fused(run, request, experts, added, activations)
            verdict = run
        elif verdict.rule == "rows":
            return self._many(request, asked, experts, container, x, shared is not None, verdict)
        return self.gathered(request.rows, verdict)

    def _fused(
        self,
        run: FusedRun,
        request: KernelRequest,
        experts: expert_weights.ExpertWeights,
        added: expert_weights.SharedExpertWeights | Decline | None,
        activations: Activations,
    ) -> Decision:
        """The kernel's calls, and what the trace says of them."""
        by, notes = str(request.device), []
        if activations == "int8":
            apart = cpu_experts.int8_declines(experts)
            by = f"{by} {activations}"
            notes += [] if apart is None else [f"some with float32 activations, {apart}"]
        if isinstance(added, Decline):
            notes.append(f"the shared expert apart, {added}. {added.hint}")
        elif added is not None:
            notes.append("with the shared expert")
        key = TraceKey(self.layer, "fused", rows_label(request.rows), by)
        adds = added is not None and not isinstance(added, Decline)
        return Decision(run, trace.tally(key, "; ".join(notes)), adds_shared=adds)

    def _many(
        self,
        request: KernelRequest,
        asked: Policy,
        experts: expert_weights.ExpertWeights | None,
        container: nn.Module,
        x: mx.array,
        wide: bool,
        why: Decline,
    ) -> Decision:
        """The path for many rows where this device has one that pays, else gathered products.

        Args:
            wide: leave the sum in float32, because a shared expert is still to be added.
            why: the fused kernel's reason.
        """
        if experts is not None and experts.slots is not None:
            return self.gathered(request.rows, why)
        verdict = eligibility.check_many(request, asked)
        if isinstance(verdict, Decline):
            return self.gathered(request.rows, why if verdict.rule == "rows" else verdict)
        assert experts is not None  # an adapted container is declined
        kernel = many_rows_kernel(request.device)
        declined = kernel.declines(request)
        if declined is None:
            # A few tokens say as much as a prompt.
            few = mx.zeros((min(request.rows, _TRIED_ROWS), x.shape[-1]), x.dtype)
            tried = replace(request, rows=few.shape[0])
            run = verify.verify_kernel(kernel.PATH, kernel.prepare(experts, request), tried, container, few)
            declined = run if isinstance(run, Decline) else None
        if declined is not None:
            return self.gathered(request.rows, declined)
        key = TraceKey(self.layer, kernel.PATH, rows_label(request.rows), request.device)
        run = kernel.prepare(experts, request, mx.float32 if wide else x.dtype)
        return Decision(run, trace.tally(key), unrounded=True)

    def _registered(
        self,
        request: KernelRequest,
        asked: Policy,
        experts: expert_weights.ExpertWeights | None,
        container: nn.Module,
        x: mx.array,
    ) -> tuple[Decision | None, list[str]]:
        """The first plugin's kernel that accepts, and what those said that declined before it."""
        said: list[str] = []
        if not asked.enabled or experts is None:
            return None, said
        for name in components().names("kernel"):
            kernel = components().get("kernel", name)
            run = kernel.gate(request, asked)
            if isinstance(run, Accept):
                run = kernel.prepare(experts, x.dtype)
            if not isinstance(run, Decline):
                run = in_slots(run, experts)
                run = verify.verify_kernel(name, run, request, container, x)
            if not isinstance(run, Decline):
                key = TraceKey(self.layer, "fused", rows_label(request.rows), name)
                return Decision(run, trace.tally(key)), said
            said.append(f"{name} declined, {run}. {run.hint}")
        return None, said

    def gathered(self, rows: int, why: Decline) -> Decision:
        """Gathered products, counted under the reason."""
        key = TraceKey(self.layer, "gather", rows_label(rows), why.rule)
        return Decision(None, trace.tally(key, f"{why}. {why.hint}"))


class BoundExperts:
    """A layer's experts as they are bound in a block; its decisions are made anew when an array is replaced.

    Args:
        dispatch: decides.
        container: the routed experts.
        shared: a shared expert that the launches may add, or None.
    """

    def __init__(self, dispatch: ExpertDispatch, container: nn.Module, shared: SharedModules | None) -> None:
        self.dispatch, self.container, self._shared = dispatch, container, shared
        self._decided = self._start()

    def _start(self) -> _Decided:
        others = () if self._shared is None else self._shared.modules()
        return _Decided(expert_weights.Held.of(self.container, others), {})

    def __call__(
        self, x: mx.array, indices: mx.array, weights: mx.array, device: Device
    ) -> tuple[mx.array, bool]:
        """As :meth:`ExpertDispatch.__call__`.

        Args:
            device: that the call runs on.

        Returns:
            The sum, and whether the shared expert is in it. One that is still to be added makes the sum
            float32, so that the two are rounded together.
        """
        container, by_kind = self.container, self._standing()
        rows = prod(x.shape[:-1])
        kind = (1 if rows == 1 else rows_label(rows), indices.shape[-1], x.dtype, device, container.training)
        decision = by_kind.get(kind)
        if decision is None:
            decision = by_kind[kind] = self.dispatch.decide(
                container, x, rows, indices.shape[-1], device, self._shared
            )
        if decision.run is not None:
            y = decision.run(x, indices, weights)
            if not isinstance(y, Decline):
                decision.tally.add()
                return y, decision.adds_shared
            decision = by_kind.setdefault((*kind, y.rule), self.dispatch.gathered(rows, y))
        decision.tally.add()
        dtype = x.dtype if self._shared is None else mx.float32
        return gather.experts(container, self.dispatch.activation, x, indices, weights, dtype), False

    def in_memory(self, top_k: int) -> InMemory | None:
        """For one float32 row.

        None where the call has to be made: it decides, or something else than the CPU's kernel is needed.
        """
        key = (1, top_k, _FLOAT32, "cpu", self.container.training)
        decision = self._standing().get(key)
        return None if decision is None else decision.in_memory[self._shared is None]

    def _standing(self) -> dict[tuple[object, ...], Decision]:
        """The decisions for the modules and arrays that are there now."""
        held, by_kind = self._decided
        # `Held.stands`, written out: it is asked at every call.
        if not all(map(is_, map(dict.get, held.holders, held.names), held.members)):
            held, by_kind = self._decided = self._start()
        return by_kind
