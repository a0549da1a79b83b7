"""The fused expert computation on an NVIDIA GPU: tensor cores where the format allows, else a warp a row."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import ExpertWeights, request_of
from mlx_experts.engine.kernels.gpu.launch_pair import FusedPair, Pair
from mlx_experts.engine.kernels.gpu.source import Backend, pitch, row_values, rows_down, rows_up
from mlx_experts.engine.kernels.gpu.tiles import cuts, one_launch, two_launches
from mlx_experts.engine.kernels.gpu.tiles.cuts import CutDown, CutUp
from mlx_experts.engine.kernels.gpu.tiles.one_launch import One
from mlx_experts.engine.kernels.request import Decline, KernelRequest

BACKEND = Backend(
    prelude="prelude.cu",
    opening="const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x;\n",
    maker=lambda **arguments: mx.fast.cuda_kernel(**arguments),
    groups="gridDim.x",
)
# Bytes of shared memory that one block may have, by compute capability; others have what 8.6 has.
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_SHARED_LEAST = 99
# Multiprocessors of the devices on which one launch was measured against two.
_MULTIPROCESSORS = {"NVIDIA H200": 132}


def unavailable() -> Decline | None:
    """Why this machine cannot run the kernels, or None."""
    if mx.cuda.is_available():
        return None
    return Decline("cuda", "an NVIDIA GPU and MLX's CUDA build", "none", "pip install 'mlx-experts[cuda]'")


def launches(
    experts: ExpertWeights, request: KernelRequest, capability: tuple[int, int] | None, *, many: bool = False
) -> Pair:
    """Launches A and B for this request; without a compute capability (of 8.0 or more), a warp a row.

    Args:
        many: for several tokens, whose number follows from the grid.
    """
    words = pitch(row_values(request), request)
    if capability is not None and two_launches.takes_up(request):
        room = _room(capability)
        cut_up = cuts.cut_up(request, many=many)
        fits_up = cut_up.layout(request)[1] <= room
        if fits_up and two_launches.takes_down(request):
            cut_down = cuts.cut_down(request, many=many)
            if cut_down.layout(request)[1] <= room:
                return mma_pair(experts, request, cut_up, cut_down, many=many)
        if fits_up:
            up = two_launches.mma_up(BACKEND, experts, request, cut_up, None, many=many)
            return Pair(up, rows_down(BACKEND, experts, request, many=many), words)
    up = rows_up(BACKEND, experts, request, many=many)
    return Pair(up, rows_down(BACKEND, experts, request, many=many), words)


def _room(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may have."""
    return _SHARED.get(capability, _SHARED_LEAST) * 1024


def one(request: KernelRequest, capability: tuple[int, int] | None) -> One | None:
    """Both launches as one for a token on this device, or None where two are better."""
    if capability is None:
        return None
    multiprocessors = _MULTIPROCESSORS.get(str(mx.device_info()["device_name"]), 0)
    return one_launch.plan(request, multiprocessors, _room(capability))


def mma_pair(
    experts: ExpertWeights, request: KernelRequest, up: CutUp, down: CutDown, *, many: bool = False
) -> Pair:
    """Both tensor-core launches with the given cuts."""
    return Pair(
        two_launches.mma_up(BACKEND, experts, request, up, down, many=many),
        two_launches.mma_down(BACKEND, experts, request, down, many=many),
        pitch(down.act_words(request), request),
    )


def capability() -> tuple[int, int] | None:
    """This device's compute capability, or None where the tensor-core form does not run."""
    info = mx.device_info()
    found = (int(info["compute_capability_major"]), int(info["compute_capability_minor"]))
    return found if found >= (8, 0) else None


def prepare(experts: ExpertWeights, dtype: mx.Dtype, *, tensor_cores: bool = True) -> FusedPair | Decline:
    """The fused function of one layer; ``tensor_cores=False`` keeps the warp-per-row form (for tests)."""
    request = partial(request_of, experts, experts.activation, rows=1, dtype=dtype, device="cuda")
    chip = capability() if tensor_cores else None

    def plan(top_k: int, many: bool) -> Pair:
        return launches(experts, request(top_k=top_k), chip, many=many)

    return FusedPair(BACKEND, experts, dtype, plan=plan, one=lambda k: one(request(top_k=k), chip))
