"""The fall-back for any number of rows: mlx-lm's projections through gathered products.

The projections are called, not read, so adapters and plugins' own modules work. Expert outputs are weighted
and summed in float32 and rounded once, as on every path.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.expert_weights import children, global_factor
from mlx_experts.engine.kernels.request import Activation

# From this many (row, expert) pairs on, mlx-lm's containers order the pairs by expert so that the gathered
# products stream each expert once; the products take that order as a promise.
SORT_FROM = 64
_WIDE = (mx.float32, mx.float32)


def combine(outputs: mx.array, weights: mx.array, dtype: mx.Dtype) -> mx.array:
    """The weighted sum over experts: ``[..., K, H]`` and ``[..., K]`` to ``[..., H]``.

    Summed in float32: rounding each product to bfloat16 first costs 5 to 13 % where outputs cancel.
    """
    wide = outputs.astype(mx.float32) * weights.astype(mx.float32)[..., None]
    return wide.sum(axis=-2).astype(dtype)


def _product(module: nn.Module, rows: mx.array, pairs: mx.array, ordered: bool) -> mx.array:
    """The module's own product, except where MLX 0.32 has none on the CPU, or none that sums in float32.

    It has none for nvfp4 with a global scale and for unquantised weights below float32. Its products of
    packed weights sum in the dtype of the rows: 6 % off in bfloat16 over 2880 inputs.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and type(module) is SwitchLinear and (rows.dtype, module.weight.dtype) != _WIDE:
        wide = mx.gather_mm(
            rows.astype(mx.float32),
            module.weight.astype(mx.float32).swapaxes(-1, -2),
            rhs_indices=pairs,
            sorted_indices=ordered,
        )
        if "bias" in module:
            wide = wide + mx.expand_dims(module["bias"][pairs], -2)
        return wide.astype(rows.dtype)
    if on_cpu and type(module) is QuantizedSwitchLinear and rows.dtype != mx.float32:
        return _product(module, rows.astype(mx.float32), pairs, ordered).astype(rows.dtype)
    if not (on_cpu and type(module) is QuantizedSwitchLinear and module.global_scale is not None):
        return module(rows, pairs, sorted_indices=ordered)
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
    factor = global_factor(module["global_scale"])[pairs]
    y = (y.astype(mx.float32) * factor[..., None, None]).astype(y.dtype)
    return y + mx.expand_dims(module["bias"][pairs], -2) if "bias" in module else y


def experts(
    container: nn.Module, activation: Activation, x: mx.array, indices: mx.array, weights: mx.array
) -> mx.array:
    """``sum_k weights[k] * down_k(act(gate_k x, up_k x))`` for every row.

    Args:
        container: an expert container of mlx-lm (``gate_proj, up_proj, down_proj`` or ``fc1, fc2``).
        x: ``[..., H]``.
        indices: ``[..., K]`` integers below E, in any order.
        weights: ``[..., K]``.

    Returns:
        ``[..., H]`` in the dtype of ``x``.
    """
    if not x.size:
        return mx.zeros_like(x)
    parts = children(container)
    top_k = indices.shape[-1]
    pairs = mx.stop_gradient(indices).reshape(-1)
    rows = x.reshape(-1, 1, x.shape[-1])
    ordered = pairs.size >= SORT_FROM
    if ordered:
        order = mx.argsort(pairs)
        pairs, rows = pairs[order], rows[order // top_k]
    else:
        rows = mx.expand_dims(rows, 1)
        pairs = pairs.reshape(-1, top_k)
    up = _product(parts["up"], rows, pairs, ordered)
    gate = _product(parts["gate"], rows, pairs, ordered) if "gate" in parts else None
    outputs = _product(parts["down"], activations.apply(activation, gate, up), pairs, ordered)
    outputs = outputs.reshape(-1, outputs.shape[-1])
    if ordered:
        outputs = outputs[mx.argsort(order)]
    outputs = outputs.reshape(*indices.shape, outputs.shape[-1])
    return combine(outputs, weights, x.dtype)
