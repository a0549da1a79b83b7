"""The fused expert computation on an NVIDIA GPU: tensor cores where the format allows, else a warp a row."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_experts.engine.kernels import mma
from mlx_experts.engine.kernels._fused import FusedPair, Pair
from mlx_experts.engine.kernels.facts import Decline, ExpertFacts
from mlx_experts.engine.kernels.pack import PackedExperts, facts_of
from mlx_experts.engine.kernels.source import Backend, is_weighed, row_values, rows_down, rows_up

BACKEND = Backend(
    prelude="prelude.cu",
    opening="const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x;\n",
    maker=lambda **arguments: mx.fast.cuda_kernel(**arguments),
)
# Bytes of shared memory that one block may have, by compute capability; others have what 8.6 has.
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_SHARED_LEAST = 99


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernels, or None."""
    if mx.cuda.is_available():
        return None
    return Decline("cuda", "an NVIDIA GPU and MLX's CUDA build", "none", "pip install 'mlx-experts[cuda]'")


def launches(experts: PackedExperts, facts: ExpertFacts, capability: tuple[int, int] | None) -> Pair:
    """Launches A and B for these facts; without a compute capability (of 8.0 or more), a warp a row."""
    words = row_values(facts) + is_weighed(facts)
    if capability is not None and mma.takes_up(facts):
        room = _SHARED.get(capability, _SHARED_LEAST) * 1024
        cut_up = mma.cut_up(facts)
        fits_up = mma.up_layout(facts, cut_up)[1] <= room
        if fits_up and mma.takes_down(facts):
            cut_down = mma.cut_down(facts)
            if mma.down_layout(cut_down)[1] <= room:
                up = mma.mma_up(BACKEND, experts, facts, cut_up, fragments=True)
                return Pair(
                    up,
                    mma.mma_down(BACKEND, experts, facts, cut_down),
                    mma.act_words(facts) + is_weighed(facts),
                )
        if fits_up:
            up = mma.mma_up(BACKEND, experts, facts, cut_up, fragments=False)
            return Pair(up, rows_down(BACKEND, experts, facts), words)
    return Pair(rows_up(BACKEND, experts, facts), rows_down(BACKEND, experts, facts), words)


def capability() -> tuple[int, int] | None:
    """This device's compute capability, or None where the tensor-core form does not run."""
    info = mx.device_info()
    found = (int(info["compute_capability_major"]), int(info["compute_capability_minor"]))
    return found if found >= (8, 0) else None


def prepare(experts: PackedExperts, dtype: mx.Dtype, *, tensor_cores: bool = True) -> FusedPair | Decline:
    """The fused function of one layer; ``tensor_cores=False`` keeps the warp-per-row form (for tests)."""
    facts = partial(facts_of, experts, experts.activation, rows=1, dtype=dtype, device="cuda")
    chip = capability() if tensor_cores else None
    return FusedPair(BACKEND, experts, dtype, plan=lambda k: launches(experts, facts(top_k=k), chip))
