"""Experts of many tokens in plain MLX: one decoded stack at a time, then products of rows ordered by expert.

A decoded stack takes memory (``workspace_bytes``) while its product runs. This is no device's default: on
CUDA ``gpu.grouped`` decodes within the product, and no Metal device has run this code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.expert_weights import ExpertWeights, Stack
from mlx_experts.engine.kernels.gather import combine
from mlx_experts.engine.kernels.request import Decline, KernelRequest

PATH: Literal["dequantized"] = "dequantized"


def workspace_bytes(request: KernelRequest) -> int:
    """Bytes of one decoded stack and of the rows by expert."""
    size = 4 if request.dtype == "float32" else 2
    h, f = request.input_width, request.expert_width
    return size * (request.num_experts * h * f + request.rows * request.top_k * (2 * h + 3 * f))


def decoded(stack: Stack, dtype: mx.Dtype) -> mx.array:
    """``[E, rows, cols]`` in a dtype."""
    p = stack.projection
    if p.format == "plain":
        return stack.weight.astype(dtype)
    assert stack.scales is not None
    scales, biases = stack.scales, stack.biases
    if biases is not None and dtype == mx.float32:
        scales, biases = scales.astype(dtype), biases.astype(dtype)  # MLX computes in their dtype
    y = mx.dequantize(
        stack.weight,
        scales,
        biases,
        group_size=p.group_size,
        bits=p.bits,
        mode=p.format,
        dtype=dtype,
    )
    if stack.global_scale is None:
        return y
    # What MLX keeps is the largest value, 6 times 448 in codes.
    factor = stack.global_scale.astype(mx.float32)[:, None, None] / (6 * 448)
    return (y.astype(mx.float32) * factor).astype(dtype)


@dataclass(frozen=True, eq=False)
class Dequantized:
    """One layer's experts as a function of many tokens (see ``FusedRun``).

    Args:
        dtype: of the result; None for that of the rows.
    """

    experts: ExpertWeights
    dtype: mx.Dtype | None = None

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``x [..., H]``, ``indices`` and ``weights`` ``[..., K]`` to ``y`` like ``x``."""
        flat, top_k = mx.stop_gradient(indices).reshape(-1), indices.shape[-1]
        order = mx.argsort(flat)
        expert, rows = flat[order], x.reshape(-1, x.shape[-1])[order // top_k]
        held = self.experts
        gate = None if held.gate is None else _product(held.gate, rows, expert)
        act = activations.apply(held.activation, gate, _product(held.up, rows, expert))
        outputs = _product(held.down, act, expert)[mx.argsort(order)]
        return combine(outputs.reshape(*indices.shape, x.shape[-1]), weights, self.dtype or x.dtype)


def _product(stack: Stack, rows: mx.array, expert: mx.array) -> mx.array:
    y = mx.gather_mm(
        rows[:, None, :],
        decoded(stack, rows.dtype).swapaxes(-1, -2),
        rhs_indices=expert,
        sorted_indices=True,
    )[:, 0]
    return y if stack.bias is None else y + stack.bias[expert].astype(y.dtype)


def declines(request: KernelRequest) -> Decline | None:
    """What stands against the path."""
    if not mx.cuda.is_available():
        return None
    return Decline(
        "many_rows",
        "right products of ordered rows",
        "MLX's on CUDA, which are wrong",
        "The grouped path serves CUDA.",
    )


def prepare(experts: ExpertWeights, request: KernelRequest, dtype: mx.Dtype | None = None) -> Dequantized:
    """The path for one layer."""
    return Dequantized(experts, dtype)
