"""The one Mixture-of-Experts block: router, routed experts, shared expert.

Legend: B batch, L tokens, D model width, K experts per token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_experts.engine.dispatch.expert_dispatch import Beside, ExpertDispatch
from mlx_experts.engine.kernels import expert_weights
from mlx_experts.engine.kernels.request import Activation, Device, KernelRequest
from mlx_experts.engine.layers.mlp import MLP, activation_of
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.router import Router
from mlx_experts.engine.layers.tensor_parallel import Group, spread_experts
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import SharedSpec


class MoE(nn.Module):
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
        self._router = Router(spec.router, dims, columns, sizes.top_k, sizes.norm_eps)
        self._router.build(self)
        self._router.use_fused(fused)
        self._latent = experts.latent if experts.latent is not None and experts.latent.exists else None
        inner = self._latent.width if self._latent else dims
        width = experts.width if experts.width is not None else sizes.expert_width
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
        self._dispatch = ExpertDispatch(name, activation, fused)
        self._group: Group | None = None
        shared = spec.shared
        self._shared = shared if shared is not None and shared.exists else None
        if self._shared and not self._shared.path.startswith("../"):
            place(self, self._shared.path, make_shared(self._shared, dims))
        if self._shared and self._shared.gate:
            outputs = 1 if self._shared.combine == "sigmoid_gate" else 2
            place(self, self._shared.gate, nn.Linear(dims, outputs, bias=self._shared.gate_bias))

    @property
    def experts_path(self) -> str:
        """Module path of the expert container, from this block."""
        return self._spec.experts.path

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
        return self._router(self, x)

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
        self._dispatch = ExpertDispatch(self._dispatch.layer, self._dispatch.activation, fused)
        self._router.use_fused(fused)

    def request(self, rows: int, device: Device) -> KernelRequest:
        """What a fused kernel would be asked for a call of ``rows`` token rows."""
        container = find(self, self._spec.experts.path)
        activation, top_k = self._dispatch.activation, self._router.top_k
        if self._spec.experts.weigh == "input":
            # Every pick is a row of its own: see _on_weighted_input.
            rows, top_k = rows * top_k, 1
        return expert_weights.request_of(
            expert_weights.read(container, activation),
            activation,
            rows=rows,
            top_k=top_k,
            dtype=self._router.matrix(self).dtype,
            device=device,
            training=self.training,
        )

    def __call__(self, x: mx.array, shared: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D].

        Args:
            shared: the shared expert, where it lives in the layer and not in this block.
        """
        if self._shared is None:
            return self.routed(x)
        expert = shared or find(self, self._shared.path)
        if not x.size or not self._may_stand_beside(expert):
            return self._join(x, self.routed(x), expert(x))
        gate = find(self, self._shared.gate) if self._shared.gate else None
        beside = Beside(expert.projections(), expert.activation, gate, lambda y: self._join(x, y, expert(x)))
        return self._dispatch(find(self, self._spec.experts.path), x, *self._router(self, x), beside)

    def _may_stand_beside(self, expert: nn.Module) -> bool:
        """Whether a kernel may add this shared expert: nothing else happens to the routed sum first."""
        spec = self._spec.experts
        assert self._shared is not None
        return (
            type(expert) is MLP
            and self._shared.combine in ("sum", "sigmoid_gate")
            and self._latent is None
            and self._group is None
            and not spec.zero_experts
            and spec.weigh != "input"
            and spec.output_scale == 1.0
        )

    def routed(self, x: mx.array, router_input: mx.array | None = None) -> mx.array:
        """The weighted sum of the picked experts.

        Args:
            router_input: what the router reads, where it is not ``x``.
        """
        spec = self._spec.experts
        if not x.size:
            return mx.zeros_like(x)
        indices, weights = self._router(self, x if router_input is None else router_input)
        identity = None
        if spec.zero_experts:
            zero = indices >= self._experts
            identity = mx.where(zero, weights, 0).sum(axis=-1, keepdims=True)
            weights, indices = mx.where(zero, 0, weights), mx.where(zero, 0, indices)
        inner = find(self, self._latent.down)(x) if self._latent else x
        container = find(self, spec.path)
        if self._group is not None:
            inner, weights = (sum_gradients(self._group)(each) for each in (inner, weights))
        if spec.weigh == "input":
            y = self._on_weighted_input(container, inner, indices, weights)
        else:
            y = self._dispatch(container, inner, indices, weights)
        if self._group is not None:
            y = mx.distributed.all_sum(y, group=self._group)
        if self._latent:
            if self._latent.norm and self._latent.norm_enabled:
                y = find(self, self._latent.norm)(y)
            y = find(self, self._latent.up)(y)
        if identity is not None:
            y = (y.astype(mx.float32) + x.astype(mx.float32) * identity).astype(x.dtype)
        return y if spec.output_scale == 1.0 else y * spec.output_scale

    def shard(self, group: Group) -> None:
        """Keep this rank's share of every routed expert; the router stays whole on every rank."""
        path = self._spec.experts.path
        spread_experts(find(self, path), group, path)
        self._group = group

    def _on_weighted_input(
        self, container: nn.Module, x: mx.array, indices: mx.array, weights: mx.array
    ) -> mx.array:
        """Each expert reads its input times its weight; every pick is a row of its own."""
        if indices.shape[-1] == 1:
            return self._dispatch(container, x * weights.astype(x.dtype), indices, mx.ones_like(weights))
        rows = x[..., None, :] * weights[..., None].astype(x.dtype)
        y = self._dispatch(container, rows, indices[..., None], mx.ones_like(weights)[..., None])
        return y.astype(mx.float32).sum(axis=-2).astype(x.dtype)

    def _join(self, x: mx.array, routed: mx.array, shared: mx.array) -> mx.array:
        assert self._shared is not None
        match self._shared.combine:
            case "sum":
                return routed + shared
            case "mean":
                return (routed + shared) * 0.5
            case "sigmoid_gate":
                return routed + mx.sigmoid(find(self, self._shared.gate or "")(x)) * shared
        mix = mx.softmax(find(self, self._shared.gate or "")(x), axis=-1, precise=True)
        return routed * mix[..., :1] + shared * mix[..., 1:]


def make_shared(spec: SharedSpec, dims: int) -> MLP:
    """The shared expert of a resolved section."""
    return MLP(
        dims,
        spec.width * spec.count,
        activation_of(spec.activation, spec.kind == "glu"),
        bias=spec.bias,
        names=spec.names,
        fused=spec.fused,
    )
