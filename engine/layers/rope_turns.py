"""Rotations of the last values of a head, backwards, by strides, and at learned frequencies."""

from __future__ import annotations

import mlx.core as mx

from mlx_experts.engine.layers.rope import Offset, Rope


def turn(
    rope: Rope,
    x: mx.array,
    offset: Offset,
    *,
    tail: bool = False,
    stride: int = 1,
    backwards: bool = False,
    log_scale: mx.array | None = None,
) -> mx.array:
    """``x`` [B, heads, L, d] rotated by positions ``offset * stride``, ``(offset + 1) * stride``, ...

    Args:
        tail: the last ``rope.dims`` values turn, not the first.
        backwards: by the negative angle, which undoes the rotation.
        log_scale: learned logarithms [dims / 2] of factors on the frequencies.
    """
    if tail and x.shape[-1] > rope.dims:
        rest, turned = mx.split(x, [x.shape[-1] - rope.dims], axis=-1)
        turned = turn(rope, turned, offset, stride=stride, backwards=backwards, log_scale=log_scale)
        return mx.concatenate([rest, turned], axis=-1)
    freqs, factor = rope.frequencies(offset, x.shape[-2])
    if log_scale is not None:
        freqs = freqs * mx.exp(-log_scale.astype(mx.float32))
    if freqs.ndim == 2:
        steps = stride if not backwards else -stride
        return rope.turn_rows(x, mx.array(offset), freqs / steps, mx.array(factor))
    if isinstance(factor, mx.array) or factor != 1.0:
        scaled = x[..., : rope.dims] * mx.array(factor).astype(x.dtype)
        x = mx.concatenate([scaled, x[..., rope.dims :]], axis=-1)
    return mx.fast.rope(
        x,
        rope.dims,
        traditional=rope.traditional,
        base=None,
        scale=float(stride),
        offset=offset,
        freqs=-freqs if backwards else freqs,
    )
