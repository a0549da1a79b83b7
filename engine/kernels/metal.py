"""The fused expert computation on an Apple GPU: the warp-per-row form that CUDA also has.

The text is compiled and run on the CPU in tests; no Metal device has run it yet.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_experts.engine.kernels._fused import FusedPair, Pair
from mlx_experts.engine.kernels.facts import Decline, ExpertFacts
from mlx_experts.engine.kernels.pack import PackedExperts, facts_of
from mlx_experts.engine.kernels.source import Backend, is_weighed, row_values, rows_down, rows_up

BACKEND = Backend(
    prelude="prelude.metal",
    opening=(
        "const int lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup,"
        " group = threadgroup_position_in_grid.x;\n"
    ),
    maker=mx.fast.metal_kernel,
)


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernels, or None."""
    if mx.metal.is_available():
        return None
    return Decline("metal", "an Apple GPU", "none", "Run on Apple silicon.")


def launches(experts: PackedExperts, facts: ExpertFacts) -> Pair:
    """Launches A and B for these facts. Small groups: MLX's own matrix-vector kernels use two SIMD groups."""
    return Pair(
        rows_up(BACKEND, experts, facts, warps=2),
        rows_down(BACKEND, experts, facts, warps=2),
        row_values(facts) + is_weighed(facts),
    )


def prepare(experts: PackedExperts, dtype: mx.Dtype) -> FusedPair | Decline:
    """The fused function of one layer."""
    facts = partial(facts_of, experts, experts.activation, rows=1, dtype=dtype, device="metal")
    return FusedPair(BACKEND, experts, dtype, plan=lambda k: launches(experts, facts(top_k=k)))
