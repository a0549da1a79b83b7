"""The fused expert computation on an Apple GPU: the warp-per-row form that CUDA also has.

The text is compiled and run on the CPU in tests; no Metal device has run it yet.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import ExpertWeights, request_of
from mlx_experts.engine.kernels.gpu.launch_pair import FusedPair, Pair
from mlx_experts.engine.kernels.gpu.source import Backend, pitch, row_values, rows_down, rows_up
from mlx_experts.engine.kernels.request import Decline, KernelRequest

BACKEND = Backend(
    prelude="prelude.metal",
    opening=(
        "const int lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup,"
        " group = threadgroup_position_in_grid.x;\n"
    ),
    maker=mx.fast.metal_kernel,
    groups="threadgroups_per_grid.x",
)


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernels, or None."""
    if mx.metal.is_available():
        return None
    return Decline("metal", "an Apple GPU", "none", "Run on Apple silicon.")


def launches(experts: ExpertWeights, request: KernelRequest, *, many: bool = False) -> Pair:
    """Launches A and B. Groups are small: MLX's own matrix-vector kernels use two SIMD groups.

    Args:
        many: for several tokens, whose number follows from the grid.
    """
    return Pair(
        rows_up(BACKEND, experts, request, warps=2, many=many),
        rows_down(BACKEND, experts, request, warps=2, many=many),
        pitch(row_values(request), request),
    )


def prepare(experts: ExpertWeights, dtype: mx.Dtype) -> FusedPair | Decline:
    """The fused function of one layer."""
    request = partial(request_of, experts, experts.activation, rows=1, dtype=dtype, device="metal")

    def plan(top_k: int, many: bool) -> Pair:
        return launches(experts, request(top_k=top_k), many=many)

    return FusedPair(BACKEND, experts, dtype, plan=plan)
