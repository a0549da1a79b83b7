"""Hyper-connections: several residual streams, collapsed for each branch and written back by learned weights.

Sources: Zhu et al. 2024 (hyper-connections); Xie et al. 2025 (manifold-constrained: the mixing matrix is
doubly stochastic). Legend: B batch, L tokens, N streams, D model width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.residual.base import Branch, ResidualForm, Site
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import ModulePath, NotNegative, Num, Spec, Times, Width


class HyperOptions(Spec):
    """Options of hyper-connections."""

    kind: Literal["hyper"] = Field(description="Several streams with learned weights.")
    streams: Width = Field(description="Residual streams.")
    eps: NotNegative = Field(description="Added to the weights that collapse the streams.")
    mix: Literal["sinkhorn", "none"] = Field(
        description="Streams are mixed by a doubly stochastic matrix, or each keeps to itself."
    )
    iterations: Times = Field(1, description="Sinkhorn steps.")
    magnitude: Num = Field(2.0, description="Factor on the sigmoid that writes a branch back.")
    write_eps: NotNegative = Field(0.0, description="Added to what that sigmoid gives.")
    mixer: ModulePath = Field("attn_hc", description="Module of the weights around the mixer, in the layer.")
    mlp: ModulePath = Field("ffn_hc", description="Module of the weights around the MLP, in the layer.")
    head: ModulePath | None = Field(
        "hc_head", description="Module of the weights that collapse the last streams; null for their mean."
    )


def stream_logits(fn: mx.array, streams: mx.array, eps: float) -> mx.array:
    """``streams`` [B, L, N, D] RMS-normalised together and multiplied by ``fn`` [M, N * D], in float32."""
    flat = mx.fast.rms_norm(streams.flatten(-2).astype(mx.float32), None, eps)
    return flat @ fn.astype(mx.float32).T


def collapse(weights: mx.array, streams: mx.array) -> mx.array:
    """The sum over streams [B, L, N, D] with weights [B, L, N], in the streams' type."""
    total = weights[..., None, :] @ streams.astype(mx.float32)
    return total[..., 0, :].astype(streams.dtype)


def sinkhorn(matrix: mx.array, iterations: int, eps: float) -> mx.array:
    """Positive matrices [..., N, N] scaled until rows and columns sum to one; columns come first and last."""
    matrix = matrix / (matrix.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(axis=-1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(axis=-2, keepdims=True) + eps)
    return matrix


class HyperConnection(Site):
    """The weights around one branch, after transformers' ``models/deepseek_v4/modeling_deepseek_v4.py``.

    Without mixing they are those of ``models/hy_v4/modeling_hy_v4.py``.

    Args:
        spec: the form's options.
        width: D.
        eps: epsilon of the norm over all streams.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("fn", "base", "scale")

    def __init__(self, spec: HyperOptions, width: int, eps: float) -> None:
        super().__init__()
        n, mixes = spec.streams, spec.mix == "sinkhorn"
        self._spec, self._eps, self._mixes = spec, eps, mixes
        rows = (2 + n) * n if mixes else 2 * n
        self.fn = mx.random.normal((rows, n * width), scale=(n * width) ** -0.5)
        self.base = mx.zeros((rows,))
        self.scale = mx.ones((3 if mixes else 2,))

    def read(self, stream: mx.array) -> tuple[mx.array, Any]:
        """Streams [B, L, N, D] to the branch's input [B, L, D]."""
        spec, n = self._spec, self._spec.streams
        logits = stream_logits(self.fn, stream, self._eps)
        scale, base = self.scale.astype(mx.float32), self.base.astype(mx.float32)
        pre = mx.sigmoid(logits[..., :n] * scale[0] + base[:n]) + spec.eps
        post = spec.magnitude * mx.sigmoid(logits[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        if spec.write_eps:
            post = post + spec.write_eps
        mix = None
        if self._mixes:
            mix = mx.unflatten(logits[..., 2 * n :] * scale[2] + base[2 * n :], -1, (n, n))
            mix = sinkhorn(mx.softmax(mix, axis=-1) + spec.eps, spec.iterations, spec.eps)
        return collapse(pre, stream), (post, mix)

    def write(self, stream: mx.array, kept: Any, branch: mx.array) -> mx.array:
        """``post * branch + mix^T @ stream``, [B, L, N, D]."""
        post, mix = kept
        wide = stream.astype(mx.float32)
        if mix is not None:
            wide = mix.swapaxes(-1, -2) @ wide
        return (wide + post[..., None] * branch[..., None, :].astype(mx.float32)).astype(stream.dtype)


class HyperHead(Site):
    """The weights that collapse the streams behind the last layer."""

    float32_leaves: ClassVar[tuple[str, ...]] = ("hc_fn", "hc_base", "hc_scale")

    def __init__(self, spec: HyperOptions, width: int, eps: float) -> None:
        super().__init__()
        self._spec, self._eps, n = spec, eps, spec.streams
        self.hc_fn = mx.random.normal((n, n * width), scale=(n * width) ** -0.5)
        self.hc_base = mx.zeros((n,))
        self.hc_scale = mx.ones((1,))

    def __call__(self, stream: mx.array) -> mx.array:
        """Streams [B, L, N, D] to [B, L, D]."""
        logits = stream_logits(self.hc_fn, stream, self._eps) * self.hc_scale.astype(mx.float32)
        return collapse(mx.sigmoid(logits + self.hc_base.astype(mx.float32)) + self._spec.eps, stream)


class Hyper(ResidualForm):
    """N copies of the embedding run beside one another through all layers.

    Args:
        spec: the form's options.
        plan: the model's plan.
    """

    def __init__(self, spec: HyperOptions, plan: Plan) -> None:
        self.spec, self.width, self.eps = spec, plan.sizes.hidden_size, plan.sizes.norm_eps

    @property
    def streams(self) -> int:
        """N."""
        return self.spec.streams

    def build(self, decoder: nn.Module) -> None:
        """Place the head's weights, where the family has them."""
        if self.spec.head is not None:
            place(decoder, self.spec.head, HyperHead(self.spec, self.width, self.eps))

    def begin(self, decoder: nn.Module, h: mx.array) -> mx.array:
        """Embeddings [B, L, D] to streams [B, L, N, D]."""
        return mx.broadcast_to(h[..., None, :], (*h.shape[:-1], self.spec.streams, h.shape[-1]))

    def end(self, decoder: nn.Module, stream: mx.array) -> mx.array:
        """Streams [B, L, N, D] to [B, L, D]."""
        if self.spec.head is None:
            return stream.mean(axis=-2)
        collapsed: mx.array = find(decoder, self.spec.head)(stream)
        return collapsed

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The weights around a branch."""
        path = self.spec.mixer if branch == "mixer" else self.spec.mlp
        return path, HyperConnection(self.spec, self.width, self.eps)
