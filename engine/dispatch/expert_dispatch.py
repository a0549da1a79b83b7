"""Chooses the path of every expert call: the fused kernel where its gate accepts, else gathered products.

The choice is made once for each kind of call on a layer's weights and kept until a projection or one of its
arrays is replaced (by quantising, by an adapter, by loading). The hot path compares identities, calls the
path and counts the call; it reads no environment and no file. Threads that meet at a
first call may each decide; the last decision stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.dispatch import eligibility, policy, tuning_cache, verify
from mlx_experts.engine.dispatch.policy import Policy
from mlx_experts.engine.dispatch.trace import TraceKey, rows_label, trace
from mlx_experts.engine.kernels import FusedRun, expert_weights, fused_kernel, gather
from mlx_experts.engine.kernels.request import (
    Accept,
    Activation,
    Decline,
    Device,
    KernelRequest,
    Verdict,
)
from mlx_experts.plugins.manager import components


@lru_cache(maxsize=1)
def _gpu() -> Device:
    return "metal" if mx.metal.is_available() else "cuda"


def current_device() -> Device:
    """The device that operations of this thread run on now."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else _gpu()


class Beside(NamedTuple):
    """A shared expert that stands beside the routed ones.

    Args:
        parts: its projections, as ``MLP.projections`` names them.
        activation: between them.
        gate: the layer of one output whose sigmoid weighs it, or None.
        add: adds it to the routed experts' output, where the kernel does not.
    """

    parts: dict[str, nn.Module]
    activation: Activation
    gate: nn.Module | None
    add: Callable[[mx.array], mx.array]

    def modules(self) -> tuple[nn.Module, ...]:
        """Every module that a decision depends on."""
        return (*self.parts.values(), *(() if self.gate is None else (self.gate,)))


@dataclass(frozen=True, eq=False)
class _Decision:
    """What one kind of call does."""

    run: FusedRun | None
    key: TraceKey
    note: str
    adds_shared: bool = False


class _Decided(NamedTuple):
    """The decisions for one state of a layer's weights.

    They are kept with that state and replaced together with it, so that a decision which one thread makes
    while another replaces the weights is never found beside the new ones.
    """

    seen: expert_weights.Snapshot
    by_kind: dict[tuple[object, ...], _Decision]


def _shared(
    request: KernelRequest, asked: Policy, beside: Beside, dtype: mx.Dtype
) -> expert_weights.SharedExpertWeights | Decline:
    """The shared expert for the kernel that takes this request, or why it is added apart."""
    packed = expert_weights.read_shared(beside.parts, beside.activation, beside.gate)
    read = (
        None if packed is None else expert_weights.shared_request(packed, dtype=dtype, device=request.device)
    )
    verdict = eligibility.check_shared(request, read, asked)
    if isinstance(verdict, Decline):
        return verdict
    assert packed is not None
    return packed


class ExpertDispatch:
    """One layer's routed experts, on whichever path fits the call.

    A plain object: it owns no parameter, is rebuilt empty when copied or pickled, and may be used from
    several threads.

    Args:
        layer: the layer's module path, for the trace.
        activation: the activation between the projections.
        fused: the argument of ``load``; None leaves the choice to the environment.
    """

    def __init__(self, layer: str, activation: Activation, fused: bool | None = None) -> None:
        self.layer, self.activation, self.fused = layer, activation, fused
        self._decided: _Decided | None = None

    def __reduce__(self) -> tuple[type[ExpertDispatch], tuple[str, Activation, bool | None]]:
        return type(self), (self.layer, self.activation, self.fused)

    def __call__(
        self,
        container: nn.Module,
        x: mx.array,
        indices: mx.array,
        weights: mx.array,
        beside: Beside | None = None,
    ) -> mx.array:
        """``sum_k weights[k] * down_k(act(gate_k x, up_k x))`` for every row, and the shared expert if any.

        Args:
            container: an expert container of mlx-lm (``gate_proj, up_proj, down_proj`` or ``fc1, fc2``).
            x: ``[..., H]``.
            indices: ``[..., K]`` integers below E, in any order.
            weights: ``[..., K]`` float32.
            beside: the shared expert, added in the same launches where they can.

        Returns:
            ``[..., H]`` in the dtype of ``x``: summed in float32 and rounded once.

        Raises:
            SettingError: a setting in the environment cannot be read.
        """
        rows = prod(x.shape[:-1])
        device = current_device()
        kind = (rows_label(rows), indices.shape[-1], x.dtype, device, container.training)
        others = () if beside is None else beside.modules()
        decided = self._decided
        if decided is None or not decided.seen.holds(container, others):
            decided = self._decided = _Decided(expert_weights.Snapshot.of(container, others), {})
        decision = decided.by_kind.get(kind)
        if decision is None:
            decision = self._decide(container, x, rows, indices.shape[-1], device, beside)
            decided.by_kind[kind] = decision
        if decision.run is not None:
            y = decision.run(x, indices, weights)
            if not isinstance(y, Decline):
                trace.add(decision.key, decision.note)
                return y if beside is None or decision.adds_shared else beside.add(y)
            decision = self._gathered(rows, y)
        trace.add(decision.key, decision.note)
        y = gather.experts(container, self.activation, x, indices, weights)
        return y if beside is None else beside.add(y)

    def _decide(
        self,
        container: nn.Module,
        x: mx.array,
        rows: int,
        top_k: int,
        device: Device,
        beside: Beside | None,
    ) -> _Decision:
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
        decision = offered or self._own(request, asked, experts, container, x, beside)
        return replace(decision, note="; ".join(filter(None, (decision.note, *said))))

    def _own(
        self,
        request: KernelRequest,
        asked: Policy,
        experts: expert_weights.ExpertWeights | None,
        container: nn.Module,
        x: mx.array,
        beside: Beside | None,
    ) -> _Decision:
        """The back-end's own kernel where its gate accepts, else gathered products."""
        device = request.device
        verdict: Verdict = eligibility.check(request, asked)
        if isinstance(verdict, Accept):
            assert experts is not None  # an adapted container is declined
            kernel = fused_kernel(device)
            shared = None if beside is None else _shared(request, asked, beside, x.dtype)
            if isinstance(shared, expert_weights.SharedExpertWeights):
                experts = replace(experts, shared=shared)
                shared_request = expert_weights.shared_request(shared, dtype=x.dtype, device=device)
                request = replace(request, shared=shared_request)
            run = kernel.unavailable() or kernel.prepare(experts, x.dtype)
            if not isinstance(run, Decline):
                run = verify.verify_kernel(device, run, request, container, x, experts.shared)
            if not isinstance(run, Decline):
                key = TraceKey(self.layer, "fused", rows_label(request.rows), device)
                if isinstance(shared, Decline):
                    return _Decision(run, key, f"the shared expert apart, {shared}. {shared.hint}")
                note = "" if shared is None else "with the shared expert"
                return _Decision(run, key, note, adds_shared=shared is not None)
            verdict = run
        return self._gathered(request.rows, verdict)

    def _registered(
        self,
        request: KernelRequest,
        asked: Policy,
        experts: expert_weights.ExpertWeights | None,
        container: nn.Module,
        x: mx.array,
    ) -> tuple[_Decision | None, list[str]]:
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
                run = verify.verify_kernel(name, run, request, container, x)
            if not isinstance(run, Decline):
                key = TraceKey(self.layer, "fused", rows_label(request.rows), name)
                return _Decision(run, key, ""), said
            said.append(f"{name} declined, {run}. {run.hint}")
        return None, said

    def _gathered(self, rows: int, why: Decline) -> _Decision:
        return _Decision(
            None, TraceKey(self.layer, "gather", rows_label(rows), why.rule), f"{why}. {why.hint}"
        )
