"""The expert computation for a few token rows, once for each back-end, and the truth they are held to.

``naive`` is the float32 truth and ``gather`` the fall-back for any number of rows. ``cpu``, ``cuda`` and
``metal`` are the fused forms; each offers the two functions of ``FusedKernel``. ``gpu.grouped`` and
``dequantized`` are for many rows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, Protocol, cast

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_experts.engine.kernels.expert_weights import ExpertWeights
    from mlx_experts.engine.kernels.request import Decline, Device, KernelRequest


class FusedRun(Protocol):
    """A few tokens through their experts: ``sum_k weights[k] * down_k(act(gate_k x, up_k x))``.

    Takes ``x`` ``[..., H]`` with as many rows as its gate accepts, ``indices``
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


def warm(device: Device) -> None:
    """Have a device's fused back-end compiled while a model is loaded, where its code is kept on disk."""
    if device == "cpu":
        importlib.import_module("mlx_experts.engine.kernels.cpu.warm").begin()


class ManyRowsKernel(Protocol):
    """What a path for many rows offers, as a module.

    ``PATH`` is its name in the trace.
    """

    PATH: Literal["grouped", "dequantized"]

    def declines(self, request: KernelRequest) -> Decline | None:
        """What this machine, or this request, lacks for the path, or None."""

    def workspace_bytes(self, request: KernelRequest) -> int:
        """Bytes beside the model that one layer's call takes."""

    def prepare(
        self, experts: ExpertWeights, request: KernelRequest, dtype: mx.Dtype | None = None
    ) -> FusedRun:
        """The path for one layer, for a request that it does not decline.

        Args:
            dtype: of the result; None for that of the rows.
        """


_MANY_ROWS: dict[Device, str] = {
    "cpu": "mlx_experts.engine.kernels.dequantized",
    "cuda": "mlx_experts.engine.kernels.gpu.grouped.experts",
    "metal": "mlx_experts.engine.kernels.dequantized",
}


def many_rows_kernel(device: Device) -> ManyRowsKernel:
    """The path for many rows of a device, imported on first use."""
    return cast(ManyRowsKernel, importlib.import_module(_MANY_ROWS[device]))
