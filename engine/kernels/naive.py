"""The truth that every path is held to: dequantised weights, float32 throughout, rounded once.

Slow on purpose. Products are sums of elementwise products, because a matrix product may use TF32 on a GPU.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.expert_weights import ExpertWeights, SharedExpertWeights, Stack


def dequantised(stack: Stack, expert: int) -> mx.array:
    """One expert's matrix ``[rows, cols]`` in float32."""
    p = stack.projection
    weight = _matrix(stack, stack.weight, expert)
    if p.format == "plain":
        return weight.astype(mx.float32)
    assert stack.scales is not None
    scales = _matrix(stack, stack.scales, expert)
    if p.format == "affine":
        assert stack.biases is not None
        return mx.dequantize(
            weight,
            scales.astype(mx.float32),
            _matrix(stack, stack.biases, expert).astype(mx.float32),
            group_size=p.group_size,
            bits=p.bits,
        )
    return mx.dequantize(
        weight,
        scales,
        group_size=p.group_size,
        bits=p.bits,
        mode=p.format,
        global_scale=None if stack.global_scale is None else stack.global_scale[expert],
        dtype=mx.float32,
    )


def _matrix(stack: Stack, array: mx.array, expert: int) -> mx.array:
    """The rows of one array that are one expert's."""
    rows = array[expert] if array.ndim == 3 else array
    return rows[stack.first : stack.first + stack.projection.rows]


def _product(stack: Stack, expert: int, v: mx.array) -> mx.array:
    """``W v + bias`` for one expert: ``[cols]`` to ``[rows]``, float32."""
    y = (dequantised(stack, expert) * v).sum(axis=-1)
    if stack.bias is None:
        return y
    bias = stack.bias[expert] if stack.bias.ndim == 2 else stack.bias
    return y + bias[stack.first : stack.first + stack.projection.rows].astype(mx.float32)


def linear_in_float32(stack: Stack, x: mx.array) -> mx.array:
    """``x W^T + bias`` of a stack of one for the rows of ``x`` ``[R, cols]``, not yet rounded."""
    return mx.stack([_product(stack, 0, row) for row in x.astype(mx.float32)])


def _through(experts: ExpertWeights, expert: int, x: mx.array) -> mx.array:
    """One expert's output for one row, float32."""
    gate = None if experts.gate is None else _product(experts.gate, expert, x)
    act = activations.apply(experts.activation, gate, _product(experts.up, expert, x))
    return _product(experts.down, expert, act)


def shared_in_float32(shared: SharedExpertWeights, x: mx.array) -> mx.array:
    """The shared expert's output for one row ``[H]``, weighed by the sigmoid of its gate if it has one."""
    wide = x.astype(mx.float32)
    y = _through(shared.expert, 0, wide)
    return y if shared.gate is None else mx.sigmoid(_product(shared.gate, 0, wide)) * y


def experts_in_float32(experts: ExpertWeights, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    """``sum_k weights[k] * down_k(act(gate_k x, up_k x))`` for every row, not yet rounded.

    A shared expert of the stacks is added, weighed by the sigmoid of its gate's row where it has one.

    Args:
        x: ``[..., H]``.
        indices: ``[..., K]`` integers below E.
        weights: ``[..., K]``.

    Returns:
        ``[..., H]`` in float32.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    k = indices.shape[-1]
    chosen: list[list[int]] = indices.reshape(-1, k).tolist()  # type: ignore[assignment]
    shares = weights.reshape(-1, k).astype(mx.float32)
    out = []
    for t, row in enumerate(chosen):
        total = mx.zeros((experts.down.projection.rows,), mx.float32)
        for j, e in enumerate(row):
            total = total + shares[t, j] * _through(experts, e, rows[t])
        if experts.shared is not None:
            total = total + shared_in_float32(experts.shared, rows[t])
        mx.eval(total)
        out.append(total)
    return mx.stack(out).reshape(x.shape) if out else mx.zeros(x.shape, mx.float32)


def experts(packed: ExpertWeights, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    """The same, rounded once to the dtype of ``x``."""
    return experts_in_float32(packed, x, indices, weights).astype(x.dtype)
