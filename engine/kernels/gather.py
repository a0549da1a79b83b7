"""The fall-back for any number of rows: mlx-lm's projections through gathered products.

The projections are called, not read, so adapters and plugins' own modules work. Expert outputs are weighted
and summed in float32 and rounded once, as on every path.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.expert_weights import children, global_factor, slots_of
from mlx_experts.engine.kernels.memory.slots import ExpertSlots
from mlx_experts.engine.kernels.request import Activation
from mlx_experts.registry.errors import SettingError

# From this many (row, expert) pairs on, mlx-lm's containers order the pairs by expert so that the gathered
# products stream each expert once; the products take that order as a promise.
SORT_FROM = 64


def combine(outputs: mx.array, weights: mx.array, dtype: mx.Dtype) -> mx.array:
    """The weighted sum over experts: ``[..., K, H]`` and ``[..., K]`` to ``[..., H]``.

    Summed in float32: rounding each product to bfloat16 first costs 5 to 13 % where outputs cancel.
    """
    wide = outputs.astype(mx.float32) * weights.astype(mx.float32)[..., None]
    return wide.sum(axis=-2).astype(dtype)


def product(module: nn.Module, rows: mx.array, pairs: mx.array, ordered: bool) -> mx.array:
    """The module's own product of float32 rows, except where MLX 0.32 has none on the CPU.

    It has none for nvfp4 with a global scale and for unquantised weights below float32.

    Args:
        module: a projection of an expert container, or whatever stands for one.
        rows: float32 inputs.
        pairs: the expert of each row.
        ordered: whether ``pairs`` rise.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if type(module) is SwitchLinear and not on_cpu and mx.cuda.is_available():
        # MLX 0.32.4's product of ordered rows is wrong on CUDA (a relative error of 1.4); without the promise
        # it is right.
        ordered = False
    if on_cpu and type(module) is SwitchLinear and module.weight.dtype != mx.float32:
        return wide_product(module, rows, pairs, ordered)
    if not (on_cpu and type(module) is QuantizedSwitchLinear and module.global_scale is not None):
        y: mx.array = module(rows, pairs, sorted_indices=ordered)
        return y
    y = mx.gather_qmm(
        rows,
        module["weight"],
        module["scales"],
        rhs_indices=pairs,
        transpose=True,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        sorted_indices=ordered,
    )
    y = y * global_factor(module["global_scale"])[pairs][..., None, None]
    return y + mx.expand_dims(module["bias"][pairs], -2) if "bias" in module else y


def wide_product(module: SwitchLinear, rows: mx.array, pairs: mx.array, ordered: bool = False) -> mx.array:
    """The product of an unquantised projection in float32, whatever it and the rows are stored in."""
    y = mx.gather_mm(
        rows.astype(mx.float32),
        module.weight.astype(mx.float32).swapaxes(-1, -2),
        rhs_indices=pairs,
        sorted_indices=ordered,
    )
    return y + mx.expand_dims(module["bias"][pairs], -2) if "bias" in module else y


def outputs(container: nn.Module, activation: Activation, x: mx.array, indices: mx.array) -> mx.array:
    """``down_e(act(gate_e x, up_e x))`` for every row and each of its experts.

    Computed in float32 from the rows on: in bfloat16 each projection rounds once more, which is all that is
    left where outputs cancel.

    Args:
        container: an expert container of mlx-lm (``gate_proj, up_proj, down_proj`` or ``fc1, fc2``).
        x: ``[..., H]``, not empty.
        indices: ``[..., K]`` integers below E, in any order.

    Returns:
        ``[..., K, H]`` in float32.
    """
    parts = children(container)
    top_k = indices.shape[-1]
    pairs = mx.stop_gradient(indices).reshape(-1)
    rows = x.astype(mx.float32).reshape(-1, 1, x.shape[-1])
    ordered = pairs.size >= SORT_FROM
    if ordered:
        order = mx.argsort(pairs)
        pairs, rows = pairs[order], rows[order // top_k]
    else:
        rows = mx.expand_dims(rows, 1)
        pairs = pairs.reshape(-1, top_k)
    slots = slots_of(container)
    if slots is None:
        each = _through(parts, activation, rows, pairs, ordered)
    else:
        each = _through_slots(slots, parts, activation, rows, pairs, ordered)
    if ordered:
        each = each[mx.argsort(order)]
    return each.reshape(*indices.shape, each.shape[-1])


def _through(
    parts: Mapping[str, nn.Module], activation: Activation, rows: mx.array, pairs: mx.array, ordered: bool
) -> mx.array:
    """The output of each pair of a row and an expert, ``[P, H]``."""
    up = product(parts["up"], rows, pairs, ordered)
    gate = product(parts["gate"], rows, pairs, ordered) if "gate" in parts else None
    each = product(parts["down"], activations.apply(activation, gate, up), pairs, ordered)
    return each.reshape(-1, each.shape[-1])


def _through_slots(
    slots: ExpertSlots,
    parts: Mapping[str, nn.Module],
    activation: Activation,
    rows: mx.array,
    pairs: mx.array,
    ordered: bool,
) -> mx.array:
    """As :func:`_through`, of experts that are put into slots as many at a time as there are.

    Raises:
        SettingError: a projection is none of mlx-lm's own, which would number the experts otherwise.
    """
    adapted = {type(each).__name__ for each in parts.values()} - {"SwitchLinear", "QuantizedSwitchLinear"}
    if adapted:
        raise SettingError(
            "experts that stay in files take no adapter",
            found=", ".join(sorted(adapted)),
            hint="load without expert_memory, or fuse the adapter first",
        )
    with slots.lock:
        if not ordered:
            # One row for each pair, as the products would spread them.
            rows = mx.broadcast_to(rows, (*pairs.shape, 1, rows.shape[-1])).reshape(-1, 1, rows.shape[-1])
        found, places = [], []
        for part in slots.parts(np.array(pairs).reshape(-1)):
            mine = np.flatnonzero(part.slots >= 0)
            # The products take the order of slots as a promise, not that of experts.
            mine = mine[np.argsort(part.slots[mine], kind="stable")]
            some = mx.array(part.slots[mine].astype(np.uint32))
            each = _through(parts, activation, rows[mx.array(mine)], some, ordered)
            # The next part takes the slots.
            mx.eval(each)
            found.append(each)
            places.append(mine)
        return mx.concatenate(found)[mx.array(np.argsort(np.concatenate(places)))]


def experts(
    container: nn.Module,
    activation: Activation,
    x: mx.array,
    indices: mx.array,
    weights: mx.array,
    dtype: mx.Dtype | None = None,
) -> mx.array:
    """``sum_k weights[k] * down_k(act(gate_k x, up_k x))`` for every row.

    Args:
        container: an expert container of mlx-lm (``gate_proj, up_proj, down_proj`` or ``fc1, fc2``).
        x: ``[..., H]``.
        indices: ``[..., K]`` integers below E, in any order.
        weights: ``[..., K]``.
        dtype: of the result; None for that of ``x``.

    Returns:
        ``[..., H]``, rounded once.
    """
    if not x.size:
        return mx.zeros_like(x)
    return combine(outputs(container, activation, x, indices), weights, dtype or x.dtype)
