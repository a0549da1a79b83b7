"""Gated residual streams: each branch reads a gated mean of all streams, and adds itself to each by a gate.

The source is transformers' ``models/qwen4_exp/modeling_qwen4_exp.py`` (GatedResidual). Legend: B batch,
L tokens, N streams, D model width.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.residual.base import Branch, ResidualForm, Site
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import ModulePath, Spec, Width


class GatedOptions(Spec):
    """Options of gated residual streams."""

    kind: Literal["gated"] = Field(description="Streams that are read and written through gates.")
    streams: Width = Field(description="Residual streams.")
    rank: Width = Field(description="Width that the reading gates go through.")
    mixer: ModulePath = Field(description="Module of the gates around the mixer, in the layer.")
    mlp: ModulePath = Field(description="Module of the gates around the MLP, in the layer.")
    head: ModulePath = Field(description="Module of the gates behind the last layer, in the decoder.")


class GroupedRMSNorm(nn.Module):
    """RMSNorm of each of N equal parts, with one weight over all of them.

    Args:
        parts: N.
        width: D of a part.
        centred: the stored weight is the distance from one.
    """

    def __init__(self, parts: int, width: int, eps: float, centred: bool) -> None:
        super().__init__()
        self.weight = mx.zeros((parts * width,)) if centred else mx.ones((parts * width,))
        self._parts, self._eps, self._centred = parts, eps, centred

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [..., N, D] to [..., N, D]."""
        weight = self.weight.astype(mx.float32).reshape(self._parts, -1)
        normed = mx.fast.rms_norm(x.astype(mx.float32), None, self._eps)
        return (normed * (1.0 + weight if self._centred else weight)).astype(x.dtype)


class GatedConnection(Site):
    """The gates around one branch, or, without ``writes``, those behind the last layer."""

    def __init__(self, spec: GatedOptions, width: int, eps: float, centred: bool, writes: bool) -> None:
        super().__init__()
        n, self._streams = spec.streams, spec.streams
        self.hc_norm = GroupedRMSNorm(n, width, eps, centred)
        self.input_mix_weight_down = nn.Linear(n * width, spec.rank, bias=False)
        self.input_mix_weight_up = nn.Linear(spec.rank, n * width, bias=False)
        self._writes = writes
        if writes:
            self.block_inject_weight = nn.Linear(n * width, n, bias=False)

    def read(self, stream: mx.array) -> tuple[mx.array, Any]:
        """Streams [B, L, N, D] to [B, L, D], with the gates [B, L, N] that write."""
        n, normed = self._streams, self.hc_norm(stream)
        flat = normed.flatten(-2)
        gate = mx.sigmoid(self.input_mix_weight_up(nn.silu(self.input_mix_weight_down(flat) / n)))
        mixed = (mx.unflatten(gate, -1, (n, -1)) * normed).mean(axis=-2)
        return mixed, 2.0 * mx.sigmoid(self.block_inject_weight(flat) / n) if self._writes else None

    def write(self, stream: mx.array, kept: Any, branch: mx.array) -> mx.array:
        """Each stream plus the branch times its gate."""
        return stream + branch[..., None, :] * kept[..., None]


class Gated(ResidualForm):
    """N copies of the embedding; branches read and write them through gates.

    Args:
        spec: the form's options.
        plan: the model's plan; the norms' weights follow its norm's offset.
    """

    def __init__(self, spec: GatedOptions, plan: Plan) -> None:
        self.spec, self.width, self.eps = spec, plan.sizes.hidden_size, plan.sizes.norm_eps
        self.centred = plan.norm.offset == "run"

    @property
    def streams(self) -> int:
        """N."""
        return self.spec.streams

    def build(self, decoder: nn.Module) -> None:
        """Place the gates behind the last layer."""
        place(decoder, self.spec.head, self._gates(writes=False))

    def begin(self, decoder: nn.Module, h: mx.array) -> mx.array:
        """Embeddings [B, L, D] to streams [B, L, N, D]."""
        return mx.broadcast_to(h[..., None, :], (*h.shape[:-1], self.spec.streams, h.shape[-1]))

    def end(self, decoder: nn.Module, stream: mx.array) -> mx.array:
        """Streams [B, L, N, D] to [B, L, D]."""
        mixed, _ = find(decoder, self.spec.head).read(stream)
        return mixed  # type: ignore[no-any-return]

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The gates around a branch."""
        return self.spec.mixer if branch == "mixer" else self.spec.mlp, self._gates(writes=True)

    def _gates(self, writes: bool) -> GatedConnection:
        return GatedConnection(self.spec, self.width, self.eps, self.centred, writes)
