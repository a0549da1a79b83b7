"""Encodes a matrix as other libraries do: the planes that they store, and the values that these stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Planes = dict[str, mx.array]
Encoder = Callable[[mx.array, int], tuple[Planes, mx.array]]


def integers(bits: int, group: int) -> Encoder:
    """compressed-tensors' symmetric integers, 32 // ``bits`` in a word; a wider group is the whole row."""

    def encode(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
        rows, columns = weight.shape
        cut, top = weight.reshape(rows, -1, min(group, columns)), (1 << bits - 1) - 1
        scale = mx.abs(cut).max(-1, keepdims=True) / top
        values = mx.clip(mx.round(cut / scale), -top - 1, top)
        unsigned = (values + (top + 1)).astype(mx.uint32).reshape(rows, -1, 32 // bits)
        packed = mx.sum(unsigned << mx.arange(0, 32, bits, dtype=mx.uint32), axis=-1).astype(mx.int32)
        planes = {"weight_packed": packed, "weight_scale": scale.squeeze(-1)}
        planes["weight_shape"] = mx.array([rows, columns], mx.int64)
        return planes, (values * scale).reshape(rows, columns)

    return encode


def nvfp4(weight: mx.array, number: int, whole: float | None = None) -> tuple[Planes, mx.array]:
    """ModelOpt's nvfp4: packed bytes, a scale for 16 values, one for the matrix.

    Args:
        number: chooses the matrix's scale, so that a scale used for a neighbour shows.
        whole: that scale, where it is to be this one.
    """
    scale = mx.array(whole if whole is not None else 0.02 * (1 + number % 5))
    packed, blocks = mx.quantize(weight / scale, mode="nvfp4")
    value = mx.dequantize(packed, blocks, mode="nvfp4", dtype=mx.float32) * scale
    planes = {"weight": packed.view(mx.uint8), "weight_scale": blocks, "weight_scale_2": scale}
    return {**planes, "input_scale": mx.array(1.0)}, value


def compressed(bits: int, group: int, name: str = "pack-quantized") -> dict[str, Any]:
    """compressed-tensors' entry of config.json for :func:`integers`."""
    weights = {"num_bits": bits, "group_size": group, "type": "int", "symmetric": True, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
