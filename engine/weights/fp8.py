"""fp8 weights to floats. e4m3 and e5m2 as in "FP8 Formats for Deep Learning" (arXiv:2209.05433)."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlx_experts.registry.quantization.formats import Encoded


def decode_fp8(tensors: Mapping[str, mx.array], how: Encoded, dense: mx.Dtype) -> dict[str, mx.array]:
    """Multiply fp8 values with their scales.

    Args:
        tensors: ``weight``, bytes ``[…, R, C]``, and ``scale``: one value, one that broadcasts as
            ``how.scale_shape``, or one for each block ``[…, ⌈R/b0⌉, ⌈C/b1⌉]``; bytes of scale are exponents.
        dense: dtype of the result; the product is rounded to it once.

    Returns:
        ``weight`` ``[…, R, C]``.
    """
    values = fp8_values(tensors["weight"], how.weight_dtype)
    scale = scale_values(tensors["scale"])
    if how.block is None:
        product = values * scale.reshape(how.scale_shape)
    else:
        product = _by_block(values, scale, how.block)
    return {"weight": product.astype(dense)}


def fp8_values(stored: mx.array, dtype: str) -> mx.array:
    """float32 values of fp8 bytes of the given safetensors dtype."""
    if dtype == "F8_E5M2":
        # e5m2 is the upper half of a float16.
        return (stored.astype(mx.uint16) << 8).view(mx.float16).astype(mx.float32)
    return mx.from_fp8(stored, mx.float32)


def scale_values(scale: mx.array) -> mx.array:
    """float32 values of scales; bytes are e8m0: 2 to the power of the byte less 127, 255 is NaN."""
    if scale.dtype != mx.uint8:
        return scale.astype(mx.float32)
    bits = scale.astype(mx.uint32) << 23
    # 2**-127 has no exponent field of its own in float32.
    bits = mx.where(scale == 0, mx.array(1 << 22, mx.uint32), bits)
    return mx.where(scale == 255, mx.array(0x7FC00000, mx.uint32), bits).view(mx.float32)


def _by_block(values: mx.array, scale: mx.array, block: tuple[int, int]) -> mx.array:
    *lead, rows, columns = values.shape
    below, beside = -rows % block[0], -columns % block[1]
    if below or beside:
        values = mx.pad(values, [(0, 0)] * len(lead) + [(0, below), (0, beside)])
    cut = values.reshape(
        *lead, (rows + below) // block[0], block[0], (columns + beside) // block[1], block[1]
    )
    whole = (cut * scale[..., :, None, :, None]).reshape(*lead, rows + below, columns + beside)
    return whole[..., :rows, :columns]
