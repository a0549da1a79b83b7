"""Attention whose values may come from experts, with a norm for each head and a gate (K2 Horizon, MoVA).

Legend: B batch, L tokens, D model width, h heads, g key-value heads, d head width, E experts, K picks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mixers.routed import picked_product
from mlx_experts.engine.layers.module_tree import PartedRMSNorm, find
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.layers.router import SCORES, BareLinear
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.values import Bool, Count, Num, Spec, Width


class RoutedValuesOptions(Spec):
    """Options of attention whose values may come from experts."""

    attention: GqaSpec = Field(description="The attention, without norms, rotation or gate of its own.")
    head_norms: Bool = Field(False, description="Each query and key head has a norm with weights of its own.")
    rotated: Width | None = Field(
        None, description="Rotated width; pairs lie half a head apart. Null for all."
    )
    gate: Literal["silu", "softplus"] | None = Field(
        None, description="Function of the gate on the output; the softplus is in base two."
    )
    experts: Count = Field(0, description="Value experts of layers with experts; 0 for none.")
    top_k: Count = Field(0, description="Value experts that a token picks.")
    score: Literal["softmax", "sigmoid"] = Field("softmax", description="Score of value experts.")
    scale: Num = Field(1.0, description="Factor on their weights.")
    bias: Bool = Field(False, description="Whether a bias takes part in picking them.")


class RoutedValuesAttention(Attention):
    """``v = sum of w silu(V_e x)`` over a token's picked experts; after transformers' ``models/k2_horizon``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`RoutedValuesOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: a token picks more value experts than there are.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        self._values = spec = mixer_options(RoutedValuesOptions, layer, "attention with routed values")
        self._routed = bool(spec.experts) and layer.moe is not None
        if self._routed and not 1 <= spec.top_k <= spec.experts:
            raise ConfigError(
                "a token cannot pick that many value experts",
                where="config.json",
                expected=f"1 to {spec.experts}",
                found=str(spec.top_k),
            )
        attention = spec.attention.model_copy(update={"values_from_keys": self._routed})
        rope = layer.rope
        super().__init__(dataclasses.replace(layer, mixer=attention), plan)
        sizes, d = layer.sizes, self.head_dim
        self._turned = spec.rotated or d
        self._pairs = Rope(rope, self._turned, self._turned) if rope is not None else None
        if self._routed:
            inner = self.kv_heads * self.v_head_dim
            self.v_router = BareLinear(sizes.hidden_size, spec.experts, bias=spec.bias)
            self.v_experts = SwitchLinear(sizes.hidden_size, inner, spec.experts, bias=False)
        if spec.head_norms:
            self.q_norm = PartedRMSNorm(self.heads * d, self.heads, sizes.norm_eps)
            self.k_norm = PartedRMSNorm(self.kv_heads * d, self.kv_heads, sizes.norm_eps)
        if spec.gate is not None:
            self.gate_proj = nn.Linear(sizes.hidden_size, self.heads * self.v_head_dim, bias=False)

    def values(self, x: mx.array) -> mx.array:
        """``x`` [B, L, D] to the picked experts' values [B, L, g * d]."""
        spec = self._values
        scores = SCORES[spec.score]((x @ self.v_router.weight.T).astype(mx.float32))
        chosen = scores + self.v_router.bias.astype(mx.float32) if spec.bias else scores
        picked = mx.stop_gradient(mx.argpartition(-chosen, kth=spec.top_k - 1, axis=-1)[..., : spec.top_k])
        weights = mx.take_along_axis(scores, picked, axis=-1)
        if spec.top_k > 1:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        each = nn.silu(picked_product(self.v_experts, x[..., None, None, :], picked)[..., 0, :])
        total = (each.astype(mx.float32) * (weights * spec.scale)[..., None]).sum(axis=-2)
        return total.astype(x.dtype)

    def bind_project(self) -> Any:
        """As for any attention, with the experts' values where there are any."""
        project = super().bind_project()
        if not self._routed:
            return project

        def projected(x: mx.array, state: ForwardState) -> tuple[Any, Any, Any, Any]:
            q, k, _, gate = project(x, state)
            return q, k, self.values(x), gate

        return projected

    def bind_heads(self, heads: int, leaf: str) -> Callable[[mx.array, Any], mx.array]:
        """Queries or keys [B, L, heads * d] to heads [B, heads, L, d], normalised and turned."""
        norm = None if not self._values.head_norms else self.q_norm if heads == self.heads else self.k_norm
        return lambda t, offset: self._turn(t if norm is None else norm(t), heads, offset)

    def bind_queries(self) -> Callable[[mx.array, Any], mx.array]:
        """Queries, normalised and turned."""
        norm = self.q_norm if self._values.head_norms else None
        return lambda t, offset: self._turn(t if norm is None else norm(t), self.heads, offset)

    def bind_keys(self) -> Callable[[mx.array, Any], mx.array]:
        """Keys, normalised and turned."""
        norm = self.k_norm if self._values.head_norms else None
        return lambda t, offset: self._turn(t if norm is None else norm(t), self.kv_heads, offset)

    def _turn(self, t: mx.array, heads: int, offset: Any) -> mx.array:
        t = mx.unflatten(t, -1, (heads, self.head_dim)).swapaxes(1, 2)
        if self._pairs is None or self._turned == self.head_dim:
            return t if self._pairs is None else self._pairs(t, offset)
        half, part = self.head_dim // 2, self._turned // 2
        a, b = t[..., :half], t[..., half:]
        turned = self._pairs(mx.concatenate([a[..., :part], b[..., :part]], axis=-1), offset)
        first, second = mx.split(turned, 2, axis=-1)
        return mx.concatenate([first, a[..., part:], second, b[..., part:]], axis=-1)

    def bind_output(self, logits_given: bool = False) -> Any:
        """The output projection; behind a gate a function of its input and the layer's."""
        out_proj = find(self, self._spec.names.o)
        if self._values.gate is None:
            return out_proj
        logits, function = self.gate_proj, nn.silu if self._values.gate == "silu" else _softplus2
        return lambda out, x, packed: out_proj(out * function(logits(x)).astype(out.dtype))

    def cuts(self) -> Cuts:
        """As for any attention, where values have a projection and heads no norms of their own.

        Raises:
            ConfigError: they have not.
        """
        if self._routed or self._values.head_norms:
            raise ConfigError(
                "attention with routed values or head norms cannot be spread over ranks",
                where=f"layer {self._layer}",
            )
        cuts = super().cuts()
        return (
            cuts
            if self._values.gate is None
            else dataclasses.replace(cuts, rows={**cuts.rows, "gate_proj": 1})
        )


def _softplus2(x: mx.array) -> mx.array:
    """``log2(1 + 2 ** x)``."""
    log2 = 0.6931471805599453
    return mx.logaddexp(x.astype(mx.float32) * log2, 0.0) / log2


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `routed_values`."""
    return {"routed_values": RoutedValuesAttention}
