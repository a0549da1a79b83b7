"""Modules as the kernels of pieces want them: matrices and norms by their arrays."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from mlx_experts.engine.dispatch.eligibility import LIMITS
from mlx_experts.engine.kernels.expert_weights import Stack, read_stack
from mlx_experts.engine.kernels.gpu.pieces.packed import Value
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Norm
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm
from mlx_experts.engine.layers.router import BareLinear

_FORMATS = LIMITS["cuda"]


def dense(module: nn.Module) -> Stack | None:
    """A linear layer's matrix, or None when it is not MLX's own or is stored as no kernel reads it."""
    plain = BareLinear if type(module) is BareLinear else nn.Linear
    return _known(read_stack(module, plain, nn.QuantizedLinear))


def tied(module: nn.Module) -> Stack | None:
    """An embedding as the matrix of an output head, or None as in :func:`dense`."""
    return _known(read_stack(module, nn.Embedding, nn.QuantizedEmbedding))


def of_each_head(module: nn.Module) -> Stack | None:
    """The matrices ``[h, rows, width]`` of mlx-lm's layer for latents, or None as in :func:`dense`."""
    return _known(read_stack(module, MultiLinear, QuantizedMultiLinear))


def _known(stack: Stack | None) -> Stack | None:
    """A matrix in a format that kernels read."""
    if stack is None:
        return None
    p = stack.projection
    known = p.bits in _FORMATS.bits.get(p.format, ()) and p.group_size in _FORMATS.groups[p.format]
    return stack if known else None


def unread(name: str) -> Decline:
    """Why a piece with this matrix runs in plain MLX."""
    return Decline("matrix", "MLX's own linear layer in a known format", name, "Fuse the adapter first.")


def on_gpu(device: Device) -> Decline | None:
    """Why a device has no kernels of pieces, or None."""
    return Decline("device", "a GPU", device, "It runs in plain MLX.") if device == "cpu" else None


def launched(piece: Piece, given: Mapping[str, Value]) -> dict[str, Value]:
    """The outputs of a launch by name, where it left them.

    Args:
        given: a call's arrays by name; those that the launch does not take are left.
    """
    return piece.left(*(given[name] for name in piece.tokens))


def norm_of(module: nn.Module) -> Norm | None:
    """An RMS norm, or None for any other."""
    if type(module) is nn.RMSNorm:
        return Norm(module["weight"], module.eps)
    if type(module) is ZeroCentredRMSNorm:
        return Norm(module["weight"], module.eps, 1.0)
    return None
