"""Planes as other libraries store them, and what they stand for, unpacked in numpy from the descriptions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.weights.dequantize import decode_encodings
from mlx_experts.registry.errors import QuantizationError

GATE = "model.layers.0.mlp.experts.3.gate_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
RNG = np.random.default_rng(7)


def minifloat(byte: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A finite value of an 8-bit float."""
    sign = -1.0 if byte >> 7 else 1.0
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


E4M3 = np.array([minifloat(b, 4, 3, 7) for b in range(256)], np.float32)
E5M2 = np.array([minifloat(b, 5, 2, 15) for b in range(256)], np.float32)


def fp8_bytes(*shape: int) -> np.ndarray:
    """Random finite e4m3 bytes."""
    return RNG.choice([b for b in range(256) if b & 0x7F != 0x7F], shape).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned values packed in 32-bit words from the lowest bits up, along the last axis."""
    each = 32 // bits
    cut = values.reshape(*values.shape[:-1], -1, each).astype(np.uint32)
    return (cut << (np.arange(each, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """e2m1 values of bytes, the low half first."""
    return np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(*packed.shape[:-1], -1)


def decode(tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None, **options: Any) -> Any:
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    options.setdefault("dense", mx.float32)
    return decode_encodings(arrays, {"quantization_config": config}, **options)


def unpacked(decoded: Any, module: str) -> np.ndarray:
    """The float32 matrix of a module that stayed packed, as MLX reads it."""
    planes = {plane: decoded.weights.get(f"{module}.{plane}") for plane in ("weight", "scales", "biases")}
    entry = {key: decoded.quantization[key] for key in ("group_size", "bits", "mode")}
    entry.update(decoded.quantization.get(module, {}))
    whole = decoded.weights.get(f"{module}.global_scale")
    return np.array(mx.dequantize(*planes.values(), **entry, global_scale=whole, dtype=mx.float32))


def refused(tensors: dict[str, np.ndarray], config: Any = None, **options: Any) -> QuantizationError:
    before = dict(tensors)
    with pytest.raises(QuantizationError) as caught:
        decode(tensors, config, **options)
    assert tensors == before
    return caught.value


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
