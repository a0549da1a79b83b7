"""Says whether this machine's kernels may be trusted, by running them against float32 truth."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels.cpu import warm
from mlx_experts.engine.kernels.request import Device
from mlx_experts.engine.tools.device import combinations, workers
from mlx_experts.engine.tools.device.combinations import Combination
from mlx_experts.engine.tools.device.report import DeviceReport, Timed, Trial

# Bytes of a GPU's memory that a process may take: its context, and the weights that it times.
_MEMORY_OF_ONE = 2 << 30


def run(*, times: bool = False, jobs: int | None = None) -> DeviceReport:
    """Run every kernel of this device.

    Args:
        times: compare some with MLX's operations too, one at a time and after all has been compiled.
        jobs: processes that compile and compare; 1 does all in this one, None leaves the number to
            :func:`usual_jobs`.

    Raises:
        DeviceError: a process could not run a combination, or ended while it did.
    """
    started, device = time.perf_counter(), current_device()
    asked = combinations.all_of(device, times=times)
    jobs = min(usual_jobs(device) if jobs is None else jobs, len(asked))
    trials, timed = _here(asked) if jobs == 1 else workers.run(asked, device, jobs)
    trace.reset()
    return DeviceReport(device, tuple(trials), tuple(timed), time.perf_counter() - started)


def usual_jobs(device: Device) -> int:
    """As many processes as cores, which MLX's compiling for a GPU keeps busy, if the GPU's memory has room.

    On the CPU one: its kernels are on disk, and a further process takes longer to start than they to run.
    """
    if device == "cpu":
        return 1
    info = mx.device_info()
    # An NVIDIA GPU says what is free, an Apple one what there is.
    memory = info.get("free_memory", info.get("memory_size"))
    return warm.cores() if memory is None else max(1, min(warm.cores(), int(memory) // _MEMORY_OF_ONE))


def verdict() -> str:
    """The paragraph alone."""
    return run().verdict()


def _here(asked: Sequence[Combination]) -> tuple[list[Trial], list[Timed]]:
    """All in this process, the times last."""
    ran = [combination.run() for combination in asked]
    timed = [each.time() for each in ran if each.time is not None]
    return [each.trial for each in ran if each.trial is not None], timed
