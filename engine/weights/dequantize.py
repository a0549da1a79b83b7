"""Turns encodings that MLX has no module for into weights or MLX's own planes, before layouts are read.

What each tensor is has been worked out in registry/encodings.py; here the plan is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.weights.awq_gptq import repack_transposed
from mlx_experts.engine.weights.fp8 import decode_fp8
from mlx_experts.engine.weights.packed import repack_integers, repack_microscaled
from mlx_experts.registry.quantization.detect import plan_encodings, shape_tensors
from mlx_experts.registry.quantization.formats import Encoded, Plane

_SPELLED = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.complex64: "C64",
}


@dataclass
class Decoded:
    """Tensors without foreign encodings.

    Args:
        weights: by name on disk.
        quantization: MLX's quantisation entry for planes that stayed packed, or None.
        notices: remarks on what was dropped or converted.
    """

    weights: dict[str, mx.array]
    quantization: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)


def decode_encodings(
    arrays: Mapping[str, mx.array],
    config: Mapping[str, Any],
    dtypes: Mapping[str, str] | None = None,
    dense: mx.Dtype = mx.bfloat16,
    values: bool = True,
) -> Decoded:
    """Decode what the config's quantisation says is encoded, lazily.

    Args:
        arrays: every tensor of the checkpoint, as ``load_arrays`` gives them.
        config: the checkpoint's config.
        dtypes: dtypes on disk where the arrays do not show them, spelled as in safetensors.
        dense: dtype of weights that MLX has no packed form for.
        values: whether the arrays hold values; without, only their shapes and dtypes are looked at.

    Raises:
        QuantizationError: an encoding is not supported, incomplete, or its shapes do not fit.
    """
    stored = {
        name: Plane((dtypes or {}).get(name, _SPELLED[array.dtype]), tuple(array.shape))
        for name, array in arrays.items()
    }
    shapes = {
        name: arrays[name]
        for name in shape_tensors(arrays)
        if values and arrays[name].size and mx.issubdtype(arrays[name].dtype, mx.integer)
    }
    mx.eval(list(shapes.values()))
    widths = {name: int(np.array(array).flat[-1]) for name, array in shapes.items()}
    entry = config.get("quantization") or config.get("quantization_config")
    plan = plan_encodings(stored, entry, widths=widths, dense=_SPELLED[dense])
    weights = dict(arrays)
    for name in plan.dropped:
        del weights[name]
    for how in plan.modules:
        planes = {role: weights.pop(name) for role, name in how.sources.items()}
        decoded = _decode(planes, how, dense, values)
        for name in how.result:
            weights[name] = decoded["weight" if how.encoding == "fp8" else name.rpartition(".")[2]]
    return Decoded(weights, plan.entry, list(plan.notices))


def _decode(
    planes: Mapping[str, mx.array], how: Encoded, dense: mx.Dtype, values: bool
) -> dict[str, mx.array]:
    if how.encoding == "fp8":
        return decode_fp8(planes, how, dense)
    if how.encoding == "integers":
        return repack_integers(planes, how)
    if how.encoding in ("awq", "gptq"):
        return repack_transposed(planes, how, values)
    return repack_microscaled(planes, how, values)
