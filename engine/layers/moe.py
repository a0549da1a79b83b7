"""The one Mixture-of-Experts block: router, routed experts, shared expert.

Legend: B batch, L tokens, D model width, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import sum_gradients
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_experts.engine.dispatch.expert_dispatch import BoundExperts, ExpertDispatch, InMemory, current_device
from mlx_experts.engine.kernels import expert_weights, gather
from mlx_experts.engine.kernels.expert_weights import SharedModules, children
from mlx_experts.engine.kernels.memory.slots import ExpertSlots, SlottedExperts
from mlx_experts.engine.kernels.request import Activation, Device, KernelRequest
from mlx_experts.engine.layers.linear import OnRow
from mlx_experts.engine.layers.mlp import MLP, activation_of
from mlx_experts.engine.layers.module_tree import find, place, take_rows
from mlx_experts.engine.layers.router import BoundRouter, Router
from mlx_experts.engine.layers.routers.observed import ObservedRouter, RoutingObserver
from mlx_experts.engine.layers.tensor_parallel import Cuts, Group
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import SharedSpec

RunExperts = Callable[[mx.array, mx.array, mx.array, Device], tuple[mx.array, bool]]


@dataclass(frozen=True, eq=False)
class MoESteps:
    """What a call of the block uses.

    Args:
        router: bound to its leaves.
        routed: ``(x, router_input=None)`` to the weighted sum.
        total: the same in float32.
        run: ``x`` to the block's output.
        lent: the shared expert, where it lives in the layer.
        on_row: as ``run`` on the CPU for one float32 row [1, D] in memory, or None where there is no such
            form; it says None where ``run`` has to be called.
    """

    router: BoundRouter
    routed: Callable[..., mx.array]
    total: Callable[..., mx.array]
    run: Callable[[mx.array], mx.array]
    lent: nn.Module | None
    on_row: OnRow | None = None


@dataclass(frozen=True, eq=False)
class ExpertsOnRow:
    """A block's sum on the CPU for one float32 row [1, D] in memory; see :class:`MoESteps`.

    Args:
        router: as a call uses it, and ``experts`` likewise.
        top_k: K.
    """

    router: BoundRouter
    experts: BoundExperts
    top_k: int

    def __call__(self, row: np.ndarray) -> np.ndarray | None:
        """The row of the sum, or None where the block has to be called."""
        # Asked first, because a call that is made after all counts the router's product itself.
        found = self.experts.in_memory(self.top_k)
        if found is None:
            return None
        routed = self.router.on_row(row)
        if routed is None:
            return None
        kernel, tally = found
        y = kernel.on_rows(row, *routed)
        tally.add()
        return y

    def decided(self) -> InMemory | None:
        """What gives the sum over the experts, and what counts it; None where it is not decided."""
        return self.experts.in_memory(self.top_k)


class MoE(VersionedModule):
    """Routes each token to K experts and adds the shared expert.

    Args:
        layer: the layer's plan, with a resolved MoE section.
        name: module path of the block, by which the trace counts.
        fused: True or False to force or forbid the fused path; None for the policy.
    """

    def __init__(self, layer: LayerPlan, name: str, fused: bool | None = None) -> None:
        super().__init__()
        assert layer.moe is not None
        spec, sizes = layer.moe, layer.sizes
        experts, dims = spec.experts, sizes.hidden_size
        self._spec, self._experts = spec, sizes.num_experts
        columns = sizes.num_experts + experts.zero_experts
        self._router = self._make_router(layer, columns)
        self._router.build(self)
        self._router.use_fused(fused)
        self._latent = experts.latent if experts.latent is not None and experts.latent.exists else None
        inner = self._latent.width if self._latent else dims
        width = sizes.expert_width
        activation = activation_of(experts.activation, experts.kind == "glu")
        if activation.gated != (experts.kind == "glu"):
            raise ConfigError(
                f"the activation '{activation.name}' does not fit experts of kind '{experts.kind}'",
                where="the family file, moe.experts",
            )
        container = SwitchGLU if experts.kind == "glu" else SwitchMLP
        place(self, experts.path, container(inner, width, sizes.num_experts, bias=experts.bias))
        if self._latent:
            place(self, self._latent.down, nn.Linear(dims, inner, bias=self._latent.bias))
            place(self, self._latent.up, nn.Linear(inner, dims, bias=self._latent.bias))
            if self._latent.norm and self._latent.norm_enabled:
                place(self, self._latent.norm, nn.RMSNorm(inner, eps=sizes.norm_eps))
        if spec.output_bias is not None:
            self[spec.output_bias] = mx.zeros((dims,))
        self._dispatch = ExpertDispatch(name, activation, fused)
        self._observer: RoutingObserver | None = None
        self._group: Group | None = None
        shared = spec.shared
        self._shared = shared if shared is not None and shared.exists else None
        if self._shared and not self._shared.path.startswith("../"):
            place(self, self._shared.path, self._make_shared(self._shared, dims))
        if self._shared and self._shared.gate:
            outputs = 1 if self._shared.combine == "sigmoid_gate" else 2
            place(self, self._shared.gate, nn.Linear(dims, outputs, bias=self._shared.gate_bias))

    def _make_router(self, layer: LayerPlan, columns: int) -> Router:
        sizes = layer.sizes
        return Router(self._spec.router, sizes.hidden_size, columns, sizes.top_k, sizes.norm_eps)

    def _make_shared(self, spec: SharedSpec, dims: int) -> nn.Module:
        return make_shared(spec, dims)

    @property
    def name(self) -> str:
        """Module path of this block, by which the trace counts."""
        return self._dispatch.layer

    @property
    def experts_path(self) -> str:
        """Module path of the expert container, from this block."""
        return self._spec.experts.path

    @property
    def experts(self) -> int:
        """Routed experts, identity experts not included."""
        return self._experts

    @property
    def groups(self) -> int:
        """Groups that selection is limited to; 1 where it is not."""
        groups = self._spec.router.groups
        return groups.count if groups is not None and groups.enabled and groups.count > 1 else 1

    def observe(self, observer: RoutingObserver | None) -> None:
        """From now on, tell somebody what each call routes and what its experts return; None for nobody."""
        self._observer = observer
        self._version.raised()

    def use_slots(self, slotted: SlottedExperts) -> None:
        """From now on, run the experts from slots of their container."""
        *parents, leaf = self._spec.experts.path.split(".")
        find(self, ".".join(parents))[leaf] = slotted
        self._version.raised()

    @property
    def slots(self) -> ExpertSlots | None:
        """The slots of experts that stay in files, or None."""
        return expert_weights.slots_of(find(self, self._spec.experts.path))

    def keep_experts(self, kept: Sequence[int]) -> None:
        """Leave out every routed expert but these, in their order, with their rows of the router.

        Raises:
            ConfigError: the experts of this block cannot be left out one by one.
        """
        self.check_keepable(self.name)
        columns = [*kept, *range(self._experts, self._router.experts)]
        for module in children(find(self, self._spec.experts.path)).values():
            take_rows(module, self._experts, kept)
        self._router.keep(self, columns)
        self._experts = len(kept)
        self._dispatch = self._dispatch.fresh()

    def check_keepable(self, where: str) -> None:
        """Hold the block to what :meth:`keep_experts` can do.

        Raises:
            ConfigError: it is spread over ranks, its experts carry an adapter, or a table routes tokens.
        """
        if self._group is not None:
            raise ConfigError("experts that are spread over ranks cannot be left out", where=where)
        if self.slots is not None:
            raise ConfigError(
                "experts that stay in files cannot be left out",
                where=where,
                hint="load without expert_memory",
            )
        names = {type(module) for module in children(find(self, self._spec.experts.path)).values()}
        if names - {SwitchLinear, QuantizedSwitchLinear}:
            raise ConfigError(
                "experts that carry an adapter cannot be left out",
                where=where,
                found=", ".join(sorted(name.__name__ for name in names)),
                hint="fuse the adapter first",
            )

    @property
    def activation(self) -> Activation:
        """The experts' activation."""
        return self._dispatch.activation

    @property
    def input_width(self) -> int:
        """Width of the block's input."""
        return self._router.dims

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Experts ``[..., K]`` and their weights ``[..., K]`` for ``x`` [..., D]."""
        return self.router(x)

    @property
    def router(self) -> BoundRouter:
        """The router with the leaves that are there now."""
        router: BoundRouter = self.steps().router
        return router

    @property
    def top_k(self) -> int:
        """Experts that a token picks."""
        return self._router.top_k

    @property
    def fused(self) -> bool | None:
        """Whether the fused path is forced or forbidden; None leaves it to the policy."""
        return self._dispatch.fused

    def use_fused(self, fused: bool | None) -> None:
        """Force, forbid or leave to the policy the fused path of this block from now on."""
        self._dispatch = self._dispatch.fresh(fused=fused)
        self._router.use_fused(fused)

    def use_activations(self, activations: str | None) -> None:
        """What the CPU's kernel multiplies activations as; None leaves it to the environment."""
        self._dispatch = self._dispatch.fresh(activations=activations)

    def request(self, rows: int, device: Device, dtype: mx.Dtype) -> KernelRequest:
        """What a fused kernel would be asked for a call of ``rows`` token rows of ``dtype``."""
        container = find(self, self._spec.experts.path)
        activation, top_k = self._dispatch.activation, self._router.top_k
        if self._spec.experts.apply_router_weight_on_input:
            # Every pick is a row of its own: see _on_weighted_input.
            rows, top_k = rows * top_k, 1
        return expert_weights.request_of(
            expert_weights.read(container, activation),
            activation,
            rows=rows,
            top_k=top_k,
            dtype=dtype,
            device=device,
            training=self.training,
        )

    def __call__(self, x: mx.array, shared: nn.Module | None = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D].

        Args:
            shared: the shared expert, where it lives in the layer and not in this block.
        """
        version, steps = self._bound.held
        if version != self._version.count:
            steps = self.rebind()
        if steps.lent is not shared:
            steps = self.lend(shared)
        return steps.run(x)

    def row_form(self, shared: nn.Module | None = None) -> OnRow | None:
        """The call on the CPU for one float32 row [1, D] in memory, where there is such a form.

        It says None where the call has to be made, and holds until something is written into the block.
        """
        steps: MoESteps = self.steps()
        return (steps if steps.lent is shared else self.lend(shared)).on_row

    def bind(self) -> MoESteps:
        """The parts of the block as they are now."""
        own = self._shared is not None and not self._shared.path.startswith("../")
        shared = find(self, self._shared.path) if self._shared is not None and own else None
        return self._bind_with(shared, None)

    def lend(self, shared: nn.Module | None) -> MoESteps:
        """The block's steps with a shared expert that lives in the layer; its writes count here too."""
        if isinstance(shared, VersionedModule):
            shared.counts_in(self)
        version = self.version
        steps = self._bind_with(shared, shared)
        self._bound.held = (version, steps)
        return steps

    def _bind_with(self, shared: nn.Module | None, lent: nn.Module | None) -> MoESteps:
        router, container = self._bind_router(), find(self, self._spec.experts.path)
        routed, on_row = self._bind_routed(router, container)
        total, run = self._bind_total(router, container), routed
        if shared is not None:
            run, on_row = self._bind_shared(router, container, shared)
        elif self.biased:
            # The bias is a part of the sum, which is rounded once.
            run, on_row = lambda x: self._with_bias(total(x)).astype(x.dtype), None
        return MoESteps(router, routed, total, run, lent, on_row)

    def _with_bias(self, y: mx.array) -> mx.array:
        """A float32 sum with the bias on the block's output, where it has one."""
        leaf = self._spec.output_bias
        return y if leaf is None else y + self[leaf]

    def _bind_router(self) -> BoundRouter:
        bound = self._router.bind(self)
        return bound if self._observer is None else ObservedRouter(bound, self._observer)

    def _bind_experts(self, container: nn.Module, shared: SharedModules | None = None) -> RunExperts:
        bound, observer, activation = self._dispatch.bind(container, shared), self._observer, self.activation
        if observer is None:
            return bound

        def observed(
            x: mx.array, indices: mx.array, weights: mx.array, device: Device
        ) -> tuple[mx.array, bool]:
            observer.applied(gather.outputs(container, activation, x, indices), indices, weights)
            return bound(x, indices, weights, device)

        return observed

    def _bind_shared(
        self,
        router: BoundRouter,
        container: nn.Module,
        shared: nn.Module,
    ) -> tuple[Callable[[mx.array], mx.array], OnRow | None]:
        """The block's call with a shared expert, and its form for a row in memory."""
        join, total = self.bind_join(), self._bind_total(router, container)

        def apart(x: mx.array) -> mx.array:
            if not x.size:
                return mx.zeros_like(x)
            wide = x.astype(mx.float32)
            return self._with_bias(join(wide, total(x), shared(wide))).astype(x.dtype)

        modules = None if self.biased else self.beside(shared)
        if modules is None:
            return apart, None
        experts = self._bind_experts(container, modules)

        def together(x: mx.array) -> mx.array:
            if not x.size:
                return apart(x)
            device = current_device()
            y, added = experts(x, *router.on(device, x), device)
            if added:
                return y
            wide = x.astype(mx.float32)
            return self._with_bias(join(wide, y, shared(wide))).astype(x.dtype)

        return together, self._bind_on_row(router, experts)

    def _bind_on_row(self, router: BoundRouter, experts: RunExperts) -> OnRow | None:
        """The sum for a row in memory, with the router and the experts of a call; see :class:`MoESteps`."""
        if not isinstance(experts, BoundExperts):
            return None  # somebody is told what is picked
        return ExpertsOnRow(router, experts, self._router.top_k)

    @property
    def biased(self) -> bool:
        """Whether a bias is added to the block's output."""
        return self._spec.output_bias is not None

    @property
    def observed(self) -> bool:
        """Whether somebody is told what is picked."""
        return self._observer is not None

    def beside(self, shared: nn.Module) -> SharedModules | None:
        """A shared expert as a kernel may add it, or None where something else happens to the sums first."""
        spec = self._shared
        if spec is None or type(shared) is not MLP or spec.combine not in ("sum", "sigmoid_gate"):
            return None
        if not self.plain:
            return None
        gate = find(self, spec.gate) if spec.gate else None
        return SharedModules(shared.projections(), shared.activation, gate)

    @property
    def plain(self) -> bool:
        """Whether the routed sum is the experts' own, of the block's own input."""
        spec = self._spec.experts
        return (
            self._latent is None
            and self._group is None
            and not spec.zero_experts
            and not spec.apply_router_weight_on_input
            and spec.output_scale == 1.0
        )

    def routed(self, x: mx.array, router_input: mx.array | None = None) -> mx.array:
        """The weighted sum of the picked experts.

        Args:
            router_input: what the router reads, where it is not ``x``.
        """
        y: mx.array = self.steps().routed(x, router_input)
        return y

    def total(self, x: mx.array, router_input: mx.array | None = None) -> mx.array:
        """As :meth:`routed`, in float32 and not yet rounded, for whoever adds something to it."""
        y: mx.array = self.steps().total(x, router_input)
        return y

    def _bind_routed(
        self, router: BoundRouter, container: nn.Module
    ) -> tuple[Callable[..., mx.array], OnRow | None]:
        """``(x, router_input=None)`` to the weighted sum in the type of ``x``, and for a row in memory."""
        if not self.plain:
            total = self._bind_total(router, container)
            return lambda x, router_input=None: total(x, router_input).astype(x.dtype), None
        experts = self._bind_experts(container)

        def plain(x: mx.array, router_input: mx.array | None = None) -> mx.array:
            if not x.size:
                return mx.zeros_like(x)
            device = current_device()
            routed = router.on(device, x if router_input is None else router_input)
            return experts(x, *routed, device)[0]

        return plain, self._bind_on_row(router, experts)

    def _bind_total(self, router: BoundRouter, container: nn.Module) -> Callable[..., mx.array]:
        """``(x, router_input=None)`` to the weighted sum in float32, whatever the type of ``x``.

        Everything but the router computes in float32, so that a block rounds once, when all is added.
        """
        experts = self._bind_experts(container)
        spec, group, latent, count = self._spec.experts, self._group, self._latent, self._experts
        down = find(self, latent.down) if latent else None
        norm = find(self, latent.norm) if latent and latent.norm and latent.norm_enabled else None
        up = find(self, latent.up) if latent else None
        run = _on_weighted_input if spec.apply_router_weight_on_input else _as_routed

        def total(x: mx.array, router_input: mx.array | None = None) -> mx.array:
            x, given = x.astype(mx.float32), x
            if not x.size:
                return mx.zeros_like(x)
            indices, weights = router(given if router_input is None else router_input)
            identity = None
            if spec.zero_experts:
                zero = indices >= count
                identity = mx.where(zero, weights, 0).sum(axis=-1, keepdims=True)
                weights, indices = mx.where(zero, 0, weights), mx.where(zero, 0, indices)
            inner = x if down is None else down(x)
            if group is not None:
                inner, weights = (sum_gradients(group)(each) for each in (inner, weights))
            y = run(experts, inner, indices, weights)
            if group is not None:
                y = mx.distributed.all_sum(y, group=group)
            if norm is not None:
                y = norm(y)
            if up is not None:
                y = up(y)
            if identity is not None:
                y = y + x * identity
            return y if spec.output_scale == 1.0 else y * spec.output_scale

        return total

    def cuts(self) -> Cuts:
        """Each rank keeps a part of every routed expert; the router stays whole on every rank."""
        if self.slots is not None:
            raise ConfigError(
                "experts that stay in files cannot be spread over ranks",
                where=self.name,
                hint="load without expert_memory",
            )
        return Cuts(experts=self._spec.experts.path)

    def divided(self, group: Group) -> None:
        """Sum over the ranks from now on."""
        self._group = group

    def bind_join(self) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
        """The block's input, the routed sum and the shared expert's output to their sum, all in float32."""
        shared = self._shared
        gate: Any = find(self, shared.gate) if shared is not None and shared.gate else None
        match shared.combine if shared is not None else "sum":
            case "sum":
                return lambda x, routed, own: routed + own
            case "mean":
                return lambda x, routed, own: (routed + own) * 0.5
            case "root_mean":
                return lambda x, routed, own: (routed + own) * 0.5**0.5
            case "sigmoid_gate":
                return lambda x, routed, own: routed + mx.sigmoid(gate(x)) * own

        def mixed(x: mx.array, routed: mx.array, own: mx.array) -> mx.array:
            mix = mx.softmax(gate(x), axis=-1, precise=True)
            return routed * mix[..., :1] + own * mix[..., 1:]

        return mixed


def _as_routed(experts: RunExperts, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    return experts(x, indices, weights, current_device())[0]


def _on_weighted_input(experts: RunExperts, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    """Each expert reads its input times its weight; every pick is a row of its own."""
    if indices.shape[-1] == 1:
        return _as_routed(experts, x * weights, indices, mx.ones_like(weights))
    rows = x[..., None, :] * weights[..., None]
    return _as_routed(experts, rows, indices[..., None], mx.ones_like(weights)[..., None]).sum(axis=-2)


def make_shared(spec: SharedSpec, dims: int) -> MLP:
    """The shared expert of a resolved section."""
    return MLP(
        dims,
        (spec.width or 0) * spec.count,
        activation_of(spec.activation, spec.kind == "glu"),
        bias=spec.bias,
        names=spec.names,
        fused=spec.fused,
    )
