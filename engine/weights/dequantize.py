"""Turns encodings that MLX has no module for into weights or MLX's own formats, before layouts are read.

What each tensor is has been worked out in registry/quantization; here the plan is carried out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_experts.engine.weights.audit import collapse
from mlx_experts.engine.weights.awq_gptq import repack_transposed
from mlx_experts.engine.weights.fp8 import decode_fp8
from mlx_experts.engine.weights.packed import repack_integers, repack_microscaled
from mlx_experts.engine.weights.reader import SPELLED
from mlx_experts.registry.errors import TensorError
from mlx_experts.registry.quantization.detect import EncodingPlan, plan_encodings, shape_tensors
from mlx_experts.registry.quantization.formats import Encoded, TensorForm


@dataclass
class Decoded:
    """Tensors without foreign encodings.

    Args:
        weights: by name on disk.
        quantization: MLX's quantisation entry for tensors that stayed packed, or None.
        notices: remarks on what was dropped or converted.
        encodings: what was undone.
    """

    weights: dict[str, mx.array]
    quantization: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)
    encodings: frozenset[str] = frozenset()


def decode_encodings(
    arrays: Mapping[str, mx.array],
    config: Mapping[str, Any],
    dtypes: Mapping[str, str] | None = None,
    dense: mx.Dtype = mx.bfloat16,
    values: bool = True,
    parameters: Mapping[str, mx.Dtype] | None = None,
) -> Decoded:
    """Decode what the config's quantisation says is encoded, lazily.

    Args:
        arrays: every tensor of the checkpoint, as ``load_arrays`` gives them.
        config: the checkpoint's config.
        dtypes: dtypes on disk where the arrays do not show them, spelled as in safetensors.
        dense: dtype of weights that MLX has no packed form for.
        values: whether the arrays hold values; without, only their shapes and dtypes are looked at.
        parameters: dtype of every parameter of the model, where the kinds of values are to be checked.

    Raises:
        TensorError: a tensor's dtype is one that no parameter takes.
        QuantizationError: an encoding is not supported, incomplete, or its shapes do not fit.
    """
    plan = find_encodings(arrays, config, dtypes, dense, values)
    if parameters is not None:
        check_kinds(arrays, plan, dtypes or {}, parameters)
    weights = dict(arrays)
    for name in plan.dropped:
        del weights[name]
    for how in plan.modules:
        tensors = {role: weights.pop(name) for role, name in how.sources.items()}
        decoded = _decode(tensors, how, dense, values)
        for name in how.result:
            weights[name] = decoded["weight" if how.encoding == "fp8" else name.rpartition(".")[2]]
    encodings = frozenset(how.encoding for how in plan.modules)
    return Decoded(weights, plan.entry, list(plan.notices), encodings)


def find_encodings(
    arrays: Mapping[str, mx.array],
    config: Mapping[str, Any],
    dtypes: Mapping[str, str] | None = None,
    dense: mx.Dtype = mx.bfloat16,
    values: bool = True,
) -> EncodingPlan:
    """What is encoded and how; arguments and errors are those of :func:`decode_encodings`."""
    stored = {
        name: _as_stored(array, (dtypes or {}).get(name, SPELLED[array.dtype]))
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
    return plan_encodings(stored, entry, widths=widths, dense=SPELLED[dense])


def _as_stored(array: mx.array, dtype: str) -> TensorForm:
    shape = tuple(array.shape)
    # Two values of four bits are one byte of the array.
    return TensorForm(dtype, (*shape[:-1], 2 * shape[-1]) if dtype == "F4" and shape else shape)


def check_kinds(
    arrays: Mapping[str, mx.array],
    plan: EncodingPlan,
    dtypes: Mapping[str, str],
    parameters: Mapping[str, mx.Dtype],
) -> None:
    """Refuse tensors whose dtype no parameter takes, before stacking or adding hides it.

    Floats are right everywhere, words and bytes as the weight and the scales of a packed module, and whole
    numbers where the model has a parameter of whole numbers of that name.

    Args:
        plan: what is encoded, whose tensors are checked already.
        dtypes: dtypes on disk, for the message.
        parameters: dtype of every parameter, by path.

    Raises:
        TensorError: naming the tensors by pattern, with their dtypes.
    """
    claimed = {*plan.dropped, *(name for module in plan.modules for name in module.sources.values())}
    whole = {
        path.rpartition(".")[2] for path, dtype in parameters.items() if mx.issubdtype(dtype, mx.integer)
    }
    odd: dict[str, list[str]] = defaultdict(list)
    for name, array in arrays.items():
        module, _, leaf = name.rpartition(".")
        unpacked = leaf == "weight" and f"{module}.scales" in arrays and array.dtype != mx.uint32
        if name in claimed or (mx.issubdtype(array.dtype, mx.floating) and not unpacked):
            continue
        # Stacks stand under a module's name or under their own.
        beside = f"{module}.scales" if leaf == "weight" else f"{name}.scales"
        packed = array.dtype == mx.uint32 and beside in arrays
        weight = f"{module}.weight" in arrays or module in arrays
        scales = leaf == "scales" and array.dtype == mx.uint8 and weight
        numbers = leaf in whole and mx.issubdtype(array.dtype, mx.integer)
        if not (packed or scales or numbers):
            odd[dtypes.get(name, SPELLED[array.dtype])].append(name)
    if odd:
        raise TensorError(
            "tensors are of a dtype that no parameter takes",
            where="; ".join(f"{', '.join(collapse(names))}: {dtype}" for dtype, names in sorted(odd.items())),
            expected="floats (F16, BF16, F32, F64), or packed words with scales",
            hint="download the file again, or take an export that keeps these tensors as floats",
        )


def _decode(
    tensors: Mapping[str, mx.array], how: Encoded, dense: mx.Dtype, values: bool
) -> dict[str, mx.array]:
    if how.encoding == "fp8":
        return decode_fp8(tensors, how, dense)
    if how.encoding == "integers":
        return repack_integers(tensors, how)
    if how.encoding in ("awq", "gptq"):
        return repack_transposed(tensors, how, values)
    return repack_microscaled(tensors, how, values)
