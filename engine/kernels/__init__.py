"""The expert computation for one token row, once for each back-end, and the truth they are held to.

``naive`` is the float32 truth and ``gather`` the fall-back for any number of rows. ``cpu``, ``cuda`` and
``metal`` are the fused forms; each offers the two functions of ``FusedKernel``.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import ExpertWeights
from mlx_experts.engine.kernels.request import Decline, Device


class FusedRun(Protocol):
    """One token through its experts: ``sum_k weights[k] * down_k(act(gate_k x, up_k x))``.

    Takes ``x`` ``[..., H]`` with one row (a plugin's kernel: as many as its gate accepts), ``indices``
    ``[..., K]`` (any integer dtype, any order) and ``weights`` ``[..., K]`` (float32). Returns ``y`` in the
    shape and dtype of ``x``, rounded once, or a Decline for what only the call itself can tell.
    """

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array | Decline: ...


class FusedKernel(Protocol):
    """What a fused back-end offers, as a module."""

    def unavailable(self) -> Decline | None:
        """Why this machine cannot run the kernel at all, or None when it can."""

    def prepare(self, experts: ExpertWeights, dtype: mx.Dtype) -> FusedRun | Decline:
        """Everything that can be done once for these weights and this activation dtype.

        Called after the gate has accepted; a Decline here is for what only the arrays can tell.
        """


_BACK_ENDS: dict[Device, str] = {
    "cpu": "mlx_experts.engine.kernels.cpu.experts",
    "cuda": "mlx_experts.engine.kernels.gpu.cuda",
    "metal": "mlx_experts.engine.kernels.gpu.metal",
}


def fused_kernel(device: Device) -> FusedKernel:
    """The fused back-end of a device, imported on first use."""
    return cast(FusedKernel, importlib.import_module(_BACK_ENDS[device]))
