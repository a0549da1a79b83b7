"""Short causal convolutions over a sequence that arrives in pieces.

Legend: B batch, L tokens, C channels, K kernel width.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def make_causal_conv(channels: int, kernel: int, bias: bool) -> nn.Conv1d:
    """A depthwise convolution without padding; :func:`causal_conv` supplies what came before."""
    return nn.Conv1d(channels, channels, kernel, groups=channels, padding=0, bias=bias)


def causal_conv(conv: nn.Conv1d, x: mx.array, mask: mx.array | None, cache: Any, slot: int = 0) -> mx.array:
    """Convolve ``x`` [B, L, C] with its own past, and remember the last K - 1 inputs.

    Args:
        conv: a depthwise convolution made by :func:`make_causal_conv`.
        mask: [B, L], False where a batch is padded; None when every position is real.
        cache: an ``ArraysCache`` whose ``slot`` holds [B, K - 1, C], or None to start afresh and keep
            nothing. Its ``lengths`` say where rows padded on the right end.

    Returns:
        [B, L, C], before any activation.
    """
    keep = conv.weight.shape[1] - 1
    if mask is not None:
        x = mx.where(mask[..., None], x, 0)
    past = cache[slot] if cache is not None else None
    if past is None:
        past = mx.zeros((x.shape[0], keep, x.shape[-1]), dtype=x.dtype)
    whole = mx.concatenate([past, x], axis=1)
    if cache is not None:
        if cache.lengths is not None:
            ends = mx.clip(cache.lengths, 0, x.shape[1])
            positions = (ends[:, None] + mx.arange(keep))[..., None]
            cache[slot] = mx.take_along_axis(whole, positions, axis=1)
        else:
            # A copy, so that the cache does not hold the whole prompt alive.
            cache[slot] = mx.contiguous(whole[:, whole.shape[1] - keep :, :])
    return conv(whole)
