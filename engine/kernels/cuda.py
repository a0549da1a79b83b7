"""The fused expert computation on an NVIDIA GPU: tensor cores where the format allows, else a warp a row."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_experts.engine.kernels import mma
from mlx_experts.engine.kernels._fused import FusedPair, Pair
from mlx_experts.engine.kernels.facts import Decline, ExpertFacts
from mlx_experts.engine.kernels.pack import PackedExperts, facts_of
from mlx_experts.engine.kernels.source import Backend, rows_down, rows_up

BACKEND = Backend(
    prelude="prelude.cu",
    opening="const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x;\n",
    maker=lambda **arguments: mx.fast.cuda_kernel(**arguments),
)
# Shared memory that one block may have on the smallest chip of compute capability 8 and later.
SHARED_LIMIT = 99 * 1024


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernels, or None."""
    if mx.cuda.is_available():
        return None
    return Decline("cuda", "an NVIDIA GPU and MLX's CUDA build", "none", "pip install 'mlx-experts[cuda]'")


def launches(experts: PackedExperts, facts: ExpertFacts, *, tensor_cores: bool) -> Pair:
    """Launches A and B for these facts."""
    values = facts.top_k * facts.expert_width
    if tensor_cores and mma.takes_up(facts):
        cut_up, cut_down = mma.cut_up(facts), mma.cut_down(facts)
        fits_up = mma.up_layout(facts, cut_up)[1] <= SHARED_LIMIT
        fits_down = mma.takes_down(facts) and mma.down_layout(facts, cut_down)[1] <= SHARED_LIMIT
        if fits_up and fits_down:
            up = mma.mma_up(BACKEND, experts, facts, cut_up, fragments=True)
            return Pair(up, mma.mma_down(BACKEND, experts, facts, cut_down), mma.act_words(facts))
        if fits_up:
            up = mma.mma_up(BACKEND, experts, facts, cut_up, fragments=False)
            return Pair(up, rows_down(BACKEND, experts, facts), values)
    return Pair(rows_up(BACKEND, experts, facts), rows_down(BACKEND, experts, facts), values)


def prepare(experts: PackedExperts, dtype: mx.Dtype, *, tensor_cores: bool = True) -> FusedPair | Decline:
    """The fused function of one layer; ``tensor_cores=False`` keeps the warp-per-row form (for tests)."""
    facts = partial(facts_of, experts, experts.activation, rows=1, dtype=dtype, device="cuda")
    return FusedPair(
        BACKEND,
        experts,
        dtype,
        plan=lambda k: launches(experts, facts(top_k=k), tensor_cores=tensor_cores),
    )
