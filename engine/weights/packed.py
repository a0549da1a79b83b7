"""Packed weights of other libraries to MLX's own quantised tensors, without unpacking them.

MLX packs values of 4 or 8 bits from the lowest bits of 32-bit words upwards, as these formats do; what
differs is how bytes, scales and zero points are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlx_experts.registry.errors import QuantizationError
from mlx_experts.registry.quantization.formats import Encoded

NVFP4_RANGE = 448.0 * 6.0
"""MLX's ``global_scale`` is the tensor's largest value: the e4m3 maximum times the e2m1 maximum times the
scale that other libraries keep."""


def repack_microscaled(
    tensors: Mapping[str, mx.array], how: Encoded, check: bool = True
) -> dict[str, mx.array]:
    """mxfp4, mxfp8 and nvfp4 tensors.

    Args:
        tensors: ``weight``: bytes or words ``[…, R, n]``, or gpt_oss's blocks ``[…, R, C/32, 16]``;
            ``scale``: bytes ``[…, R, C/g]``, or e8m0 or float powers of two for each ``how.repeat`` rows;
            ``global_scale`` multiplies, ``inverse_global_scale`` divides (compressed-tensors).
        check: read float scales to see that they are powers of two.

    Returns:
        ``weight`` uint32 ``[…, R, C·bits/32]``, ``scales`` uint8 ``[…, R, C/g]`` and, where there is one,
        ``global_scale`` float32 ``[…]``.

    Raises:
        QuantizationError: float scales are not powers of two.
    """
    weight, scale = tensors["weight"], tensors["scale"]
    if weight.ndim > len(how.result[f"{how.module}.weight"].shape):
        weight = weight.flatten(-2)
    if scale.dtype != mx.uint8:
        scale = _exponents(scale, how, check)
    if how.repeat[0] > 1:
        scale = mx.repeat(scale, how.repeat[0], axis=-2)[..., : weight.shape[-2], :]
    result = {"weight": weight.view(mx.uint32), "scales": scale}
    shape = (
        how.result[f"{how.module}.global_scale"].shape if f"{how.module}.global_scale" in how.result else ()
    )
    if "global_scale" in tensors:
        whole = tensors["global_scale"].astype(mx.float32) * NVFP4_RANGE
        result["global_scale"] = whole.reshape(shape)
    if "inverse_global_scale" in tensors:
        whole = NVFP4_RANGE / tensors["inverse_global_scale"].astype(mx.float32)
        result["global_scale"] = whole.reshape(shape)
    return result


def repack_integers(tensors: Mapping[str, mx.array], how: Encoded) -> dict[str, mx.array]:
    """Signed integers with a scale, and perhaps a zero point, as MLX's affine weight, scales and biases.

    MLX computes ``scale · q + bias`` with unsigned q. A signed value s is stored as q = s + 2^(bits-1), so
    that bias = -2^(bits-1) · scale; with a zero point z (stored in the same way), bias = -z · scale.

    Args:
        tensors: ``weight``: words ``[…, R, C·bits/32]`` or int8 ``[…, R, C]``; ``scale`` ``[…, R, groups]``;
            ``zero_point``: words packed along the rows ``[…, ⌈R·bits/32⌉, groups]``, or int8 like the scale.

    Returns:
        ``weight`` uint32, ``scales`` and ``biases`` in the scale's dtype, ``[…, R, C/how.group_size]``.
    """
    weight, scale, half = tensors["weight"], tensors["scale"], 1 << (how.bits - 1)
    if weight.dtype == mx.int8:
        weight = (weight.astype(mx.int16) + half).astype(mx.uint8)
    zero = tensors.get("zero_point")
    if zero is None:
        bias = scale * -half
    else:
        level = _zero_levels(zero, how.bits, scale.shape[-2])
        bias = (scale.astype(mx.float32) * -level).astype(scale.dtype)
    if how.repeat[1] > 1:
        scale, bias = (mx.repeat(tensor, how.repeat[1], axis=-1) for tensor in (scale, bias))
    return {"weight": weight.view(mx.uint32), "scales": scale, "biases": bias}


def _zero_levels(zero: mx.array, bits: int, rows: int) -> mx.array:
    """Unsigned zero points, float32 ``[…, R, groups]``."""
    if zero.dtype == mx.int8:
        return zero.astype(mx.float32) + float(1 << (bits - 1))
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    levels = (zero.view(mx.uint32)[..., :, None, :] >> shifts[:, None]) & ((1 << bits) - 1)
    return levels.flatten(-3, -2)[..., :rows, :].astype(mx.float32)


def _exponents(scale: mx.array, how: Encoded, check: bool) -> mx.array:
    """e8m0 bytes of float scales that are powers of two."""
    bits = scale.astype(mx.float32).view(mx.uint32)
    if check and mx.any(bits & 0x807FFFFF).item():
        raise QuantizationError(
            "Scales that should be powers of two are not.",
            where=how.sources["scale"],
            expected="powers of two, as scale_fmt says",
            hint="Remove scale_fmt from quantization_config if the scales are plain floats.",
        )
    return (bits >> 23).astype(mx.uint8)
