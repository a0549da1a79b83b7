"""AWQ's and GPTQ's packed weights to MLX's affine format; layouts as in registry/quantization/awq_gptq.py."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlx_experts.registry.errors import QuantizationError
from mlx_experts.registry.quantization.formats import Encoded

# Bits by which each of eight neighbours is shifted in AWQ's words: they are stored 0 2 4 6 1 3 5 7.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def repack_transposed(
    tensors: Mapping[str, mx.array], how: Encoded, check: bool = True
) -> dict[str, mx.array]:
    """Turn a matrix round and pack it along its input axis.

    Args:
        tensors: ``weight``, ``zero_point``, ``scale`` and perhaps ``order``, the group of each column.
        check: read ``order`` to see that groups follow each other.

    Returns:
        ``weight`` uint32 ``[R, C·bits/32]``, ``scales`` and ``biases`` ``[R, C/how.group_size]``.

    Raises:
        QuantizationError: groups are out of order (GPTQ's desc_act), which MLX cannot express.
    """
    weight, zero, scale = (
        tensors["weight"].view(mx.uint32),
        tensors["zero_point"].view(mx.uint32),
        tensors["scale"],
    )
    columns = how.result[f"{how.module}.weight"].shape[1] * 32 // how.bits
    if check and "order" in tensors:
        in_order = mx.arange(columns) // (columns // scale.shape[0])
        if not mx.array_equal(tensors["order"], in_order).item():
            raise QuantizationError(
                "Groups that are out of order are not supported.",
                where=how.sources["order"],
                expected="columns grouped one after another",
                hint="Take an export with desc_act false.",
            )
    plain = mx.arange(0, 32, how.bits, dtype=mx.uint32)
    shifts = plain if how.encoding == "gptq" else mx.array(_AWQ_SHIFTS, mx.uint32)
    level = (_unpack(zero, shifts, how.bits).astype(mx.float32) + how.zero_offset) * -1
    bias = (scale.astype(mx.float32) * level).astype(scale.dtype)
    if how.encoding == "awq":
        each = _unpack(weight, shifts, how.bits).T.reshape(-1, columns * how.bits // 32, 32 // how.bits)
        packed = mx.sum(each << plain, axis=-1)
    else:
        # GPTQ packs along the input axis already, in MLX's order.
        packed = mx.contiguous(weight.T)
    scales, biases = (mx.repeat(tensor.T, how.repeat[1], axis=1) for tensor in (scale, bias))
    return {"weight": packed, "scales": mx.contiguous(scales), "biases": mx.contiguous(biases)}


def _unpack(words: mx.array, shifts: mx.array, bits: int) -> mx.array:
    """Values ``[n, m·len(shifts)]`` of words ``[n, m]``."""
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
