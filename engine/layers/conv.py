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
        mask, cache, slot: as :func:`with_past` takes them.

    Returns:
        [B, L, C], before any activation.
    """
    return conv(with_past(x, conv.weight.shape[1] - 1, mask, cache, slot))


def with_past(x: mx.array, keep: int, mask: mx.array | None, cache: Any, slot: int = 0) -> mx.array:
    """``x`` [B, L, C] behind the ``keep`` inputs before it, [B, keep + L, C]; remembers the last ``keep``.

    Args:
        mask: [B, L], False where a batch is padded; None when every position is real.
        cache: an ``ArraysCache`` whose ``slot`` holds [B, keep, C], or None to start afresh and keep
            nothing. Its ``lengths`` say where rows padded on the right end.
    """
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
    return whole


class ResidualConv(nn.Module):
    """``(conv(x) + x) * scale`` with a depthwise causal convolution, in float32.

    The source is transformers' ``models/inkling/modeling_inkling.py`` (ShortConvolution).

    Args:
        channels: C.
        kernel: K.
        scaled: the scale is ``(K + 1) ** -0.5``, so that the variance stays as it is; otherwise 1.
    """

    def __init__(self, channels: int, kernel: int, scaled: bool) -> None:
        super().__init__()
        self.conv1d = make_causal_conv(channels, kernel, bias=False)
        self._scale = (kernel + 1) ** -0.5 if scaled else 1.0

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any, slot: int) -> mx.array:
        """``x`` [B, L, C] to [B, L, C]; the arguments are those of :func:`with_past`."""
        wide = x.astype(mx.float32)
        whole = with_past(wide, self.conv1d.weight.shape[1] - 1, mask, cache, slot)
        weight = self.conv1d.weight.astype(mx.float32)
        y = mx.conv1d(whole, weight, groups=weight.shape[0]) + wide
        return (y if self._scale == 1.0 else y * self._scale).astype(x.dtype)


class DynamicConv(nn.Module):
    """A short convolution whose taps are static ones plus ones that each token's input gives.

    The source is transformers' ``models/inkling2/modeling_inkling2.py`` (DynamicShortConvolution).

    Args:
        channels: C, in ``heads`` equal parts that share what a token gives.
        kernel: K.
        width: width D of the input that gives taps.
    """

    def __init__(self, channels: int, heads: int, kernel: int, width: int) -> None:
        super().__init__()
        # Tap 0 is the current token's.
        self.static_weight = mx.zeros((kernel, channels))
        self.weight_proj = nn.Linear(width, heads * kernel, bias=False)
        self._heads, self._kernel = heads, kernel

    def __call__(
        self, x: mx.array, given: mx.array, mask: mx.array | None, cache: Any, slot: int
    ) -> mx.array:
        """``x`` [B, L, C], with taps from ``given`` [B, L, D], to [B, L, C]."""
        L, K, heads = x.shape[1], self._kernel, self._heads
        wide = x.astype(mx.float32)
        whole = mx.unflatten(with_past(wide, K - 1, mask, cache, slot), -1, (heads, -1))
        taps = mx.unflatten(self.weight_proj(given).astype(mx.float32), -1, (heads, K))
        static = mx.unflatten(self.static_weight.astype(mx.float32), -1, (heads, -1))
        y = mx.unflatten(wide, -1, (heads, -1))
        for lag in range(K):
            y = y + whole[:, K - 1 - lag : K - 1 - lag + L] * (static[lag] + taps[..., lag : lag + 1])
        return (y.flatten(-2) * (2 * K + 1) ** -0.5).astype(x.dtype)
