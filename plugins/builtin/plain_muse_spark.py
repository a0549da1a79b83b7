"""Plain operations in the place of the Metal kernels of mlx-lm's Muse Spark, so that it runs on every device.

mlx-lm 0.32 writes parts of the model as kernels for Metal and rounds to bfloat16 in between. Here the same
steps (transformers, models/muse_spark/modeling_muse_spark.py) are float32, rounded to the type of what comes
in, so that a model in float32 is the original's.
Legend: B batch, L tokens, D model width, H heads, d head width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import muse_spark
from mlx_lm.models.base import create_attention_mask

from mlx_experts.plugins.hookspecs import hookimpl


def _unit(x: mx.array, eps: float) -> mx.array:
    """``x`` over its root mean square along the last axis, float32."""
    wide = x.astype(mx.float32)
    return wide * mx.rsqrt(mx.square(wide).mean(axis=-1, keepdims=True) + eps)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """Experts [..., K] by their biased sigmoids, and their weights: the sigmoids over their sum, scaled."""
    scores = mx.sigmoid(logits.astype(mx.float32) * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    share = mx.take_along_axis(scores, chosen, axis=-1)
    share = share / (share.sum(axis=-1, keepdims=True) + score_eps) * route_scale
    return [chosen.astype(mx.uint32), share]


def pre_norm(stream: mx.array, norm: nn.RMSNorm, *, dtype: mx.Dtype) -> mx.array:
    """The residual stream [..., D] normed, in ``dtype``."""
    return (_unit(stream, norm.eps) * norm.weight.astype(mx.float32)).astype(dtype)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    """``alpha * stream + beta * norm(branch)`` in float32, and that normed for the next branch.

    Args:
        post_weight: scales the branch before its norm, or None.
    """
    scaled = branch if post_weight is None else post_weight.astype(branch.dtype) * branch
    normed = _unit(scaled, post_eps).astype(branch.dtype).astype(mx.float32)
    after = alpha * stream + beta * normed
    return after, None if next_norm is None else pre_norm(after, next_norm, dtype=branch.dtype)


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    """The weighted sum over K of the experts' outputs [..., K, D], each scaled and normed first."""
    normed = _unit(experts.astype(mx.float32) * norm_weight.astype(mx.float32), eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    """Queries [B, L, H, d], normed and scaled, and keys, normed, which come first in each row of ``qkvg``."""
    both = mx.unflatten(qkvg[..., : (n_heads + n_kv_heads) * head_dim], -1, (-1, head_dim))
    normed = _unit(both, eps).astype(qkvg.dtype)
    queries, keys = normed[..., :n_heads, :], normed[..., n_heads:, :]
    return [(queries.astype(mx.float32) * query_scale).astype(qkvg.dtype), keys]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, head_dim: int, **sizes: Any
) -> list[mx.array]:
    """:func:`qk_norm`, then neighbours rotated from position ``offset`` on, one for each row if an array."""
    return [
        mx.fast.rope(
            each.swapaxes(1, 2), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset
        ).swapaxes(1, 2)
        for each in qk_norm(qkvg, head_dim=head_dim, **sizes)
    ]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Each head of attention's output [B, H, L, d] normed and gated by [B, L, H * d], as [B, L, H * d]."""
    heads = _unit(x, eps).swapaxes(1, 2).flatten(-2)
    return (heads * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def norm_gain(weight: mx.array) -> mx.array:
    """What a zero-centred norm multiplies by, in the type of its weight."""
    return (1.0 + weight.astype(mx.float32)).astype(weight.dtype)


class PlainBlock(muse_spark.TransformerBlock):  # type: ignore[misc]
    """mlx-lm's layer, whose first input keeps its type."""

    def __call__(self, x: mx.array, *, attn_input: mx.array | None = None, **others: Any) -> Any:
        """As mlx-lm's; ``attn_input`` None norms ``x`` first."""
        if attn_input is None:
            attn_input = pre_norm(x, self.input_layernorm, dtype=self.input_layernorm.weight.dtype)
        return super().__call__(x, attn_input=attn_input, **others)


class PlainTextModel(muse_spark.MuseSparkTextModel):  # type: ignore[misc]
    """mlx-lm's decoder, whose output keeps the type of the embedding."""

    def __call__(
        self,
        inputs: mx.array,
        *,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Token ids [B, L], or embeddings that are normed already, to hidden states [B, L, D]."""
        if self.pipeline_size > 1:
            return super().__call__(inputs, cache=cache, input_embeddings=input_embeddings)
        start = self.embed(inputs) if input_embeddings is None else input_embeddings
        stream, normed = start.astype(mx.float32), None
        caches = cache if cache is not None else [None] * len(self.layers)
        masks = {False: create_attention_mask(stream, caches[self.fa_idx])}
        if self.swa_idx is not None:
            window = self.sliding_window
            masks[True] = create_attention_mask(stream, caches[self.swa_idx], window_size=window)
        following = [layer.input_layernorm for layer in self.layers[1:]] + [None]
        for layer, its_cache, norm in zip(self.layers, caches, following, strict=True):
            mask = masks[layer.use_sliding]
            stream, normed = layer(stream, mask=mask, cache=its_cache, attn_input=normed, next_norm=norm)
        return self.norm(stream).astype(start.dtype)


@hookimpl
def register_fallbacks() -> dict[str, Any]:
    """The stand-ins `plain_muse_spark`."""
    functions = (
        expert_routing,
        norm_add_norm,
        norm_gain,
        post_expert_norm_combine,
        pre_norm,
        qk_norm,
        qk_norm_rope,
        rms_norm_sigmoid_gate,
    )
    named = {function.__name__: function for function in functions}
    classes = {"TransformerBlock": PlainBlock, "MuseSparkTextModel": PlainTextModel}
    return {"plain_muse_spark": {**named, **classes}}
