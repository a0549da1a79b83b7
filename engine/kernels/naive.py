"""The truth that every path is held to: dequantised weights, float32 throughout, rounded once.

Slow on purpose. Products are sums of elementwise products, because a matrix product may use TF32 on a GPU.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_experts.engine import activations
from mlx_experts.engine.kernels.pack import PackedExperts, Stack


def dequantised(stack: Stack, expert: int) -> mx.array:
    """One expert's matrix ``[rows, cols]`` in float32."""
    p = stack.projection
    weight = stack.weight[expert]
    if p.format == "plain":
        return weight.astype(mx.float32)
    assert stack.scales is not None
    if p.format == "affine":
        assert stack.biases is not None
        return mx.dequantize(
            weight,
            stack.scales[expert].astype(mx.float32),
            stack.biases[expert].astype(mx.float32),
            group_size=p.group_size,
            bits=p.bits,
        )
    return mx.dequantize(
        weight,
        stack.scales[expert],
        group_size=p.group_size,
        bits=p.bits,
        mode=p.format,
        global_scale=None if stack.global_scale is None else stack.global_scale[expert],
        dtype=mx.float32,
    )


def _product(stack: Stack, expert: int, v: mx.array) -> mx.array:
    """``W v + bias`` for one expert: ``[cols]`` to ``[rows]``, float32."""
    y = (dequantised(stack, expert) * v).sum(axis=-1)
    return y if stack.bias is None else y + stack.bias[expert].astype(mx.float32)


def experts_in_float32(experts: PackedExperts, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    """``sum_k weights[k] * down_k(act(gate_k x, up_k x))`` for every row, not yet rounded.

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
            gate = None if experts.gate is None else _product(experts.gate, e, rows[t])
            act = activations.apply(experts.activation, gate, _product(experts.up, e, rows[t]))
            total = total + shares[t, j] * _product(experts.down, e, act)
        mx.eval(total)
        out.append(total)
    return mx.stack(out).reshape(x.shape) if out else mx.zeros(x.shape, mx.float32)


def experts(packed: PackedExperts, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    """The same, rounded once to the dtype of ``x``."""
    return experts_in_float32(packed, x, indices, weights).astype(x.dtype)
