"""What the pieces around any mixer share: the branch's norms, and how it joins the stream.

Legend: D model width. A row of a token is ``[1, 1, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.pieces import routing, row_product
from mlx_experts.engine.kernels.gpu.pieces.packed import Value, viewed
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Norm, RowProduct, Text
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.decode.matrices import launched, norm_of
from mlx_experts.engine.layers.decode.steps import Run

_V = TypeVar("_V")
_Z = Value | None


def add(x: mx.array, rest: Sequence[mx.array], added: float | None) -> mx.array:
    """``x``, with the branch that is not yet added: ``x + added * rest[0]``.

    Args:
        added: the factor; None where there is no such branch.
    """
    if added is None:
        return x
    return x + (rest[0] if added == 1.0 else rest[0] * added)


@dataclass(frozen=True, eq=False)
class MixerBranch:
    """One layer's mixer between its norms.

    Args:
        at: index of the layer.
        norm: before the mixer, or None.
        mixer: its module.
        post: norm of the branch, or None.
        factor: on the branch when it is added.
        added: factor on the branch ``b`` of the layer before, which is not yet added; None: there is none.
        joined: arrays of the mixer that lie in one.
        counted: the next piece counts its blocks, for which the last launch leaves words of zero.
    """

    at: int
    norm: nn.Module | None
    mixer: Any
    post: nn.Module | None
    factor: float
    added: float | None
    joined: Sequence[Joined] = ()
    counted: bool = False

    @property
    def norms(self) -> list[nn.Module]:
        """The norm before the mixer, where there is one."""
        return [] if self.norm is None else [self.norm]

    @property
    def posts(self) -> list[nn.Module]:
        """The norm of the branch, where there is one."""
        return [] if self.post is None else [self.post]

    @property
    def reads(self) -> tuple[str, ...]:
        """The stream, and the branch that the first piece adds to it."""
        return ("x",) if self.added is None else ("x", "b")

    @property
    def stream(self) -> tuple[str, ...]:
        """The stream as an output of the first piece, where that adds a branch to it."""
        return () if self.added is None else ("x",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the last piece makes: the stream, and zeros where the next piece counts."""
        return ("x", "z") if self.counted else ("x",)

    def summed(self, x: mx.array, *rest: mx.array) -> mx.array:
        """The stream with the branch of the layer before."""
        return add(x, rest, self.added)

    def behind(self, x: _V, made: Sequence[_V]) -> tuple[_V, ...]:
        """The first piece's outputs, behind the stream ``x`` where that is one."""
        return tuple(made) if self.added is None else (x, *made)

    def joins(self, x: mx.array, y: mx.array, posts: Sequence[Any]) -> tuple[mx.array, ...]:
        """The stream with what the output layer gave."""
        return self._joined(x, y, posts, routing.zeros(x) if self.counted else None)

    def _joined(self, x: mx.array, y: mx.array, posts: Sequence[Any], zeros: _Z) -> tuple[Any, ...]:
        for norm in posts:
            y = norm(y)
        x = x + (y if self.factor == 1.0 else y * self.factor)
        return (x,) if zeros is None else (x, zeros)

    def rms_norm(self) -> Norm | Decline | None:
        """The norm before the mixer as kernels take it; None where there is none."""
        if self.norm is None:
            return None
        found = norm_of(self.norm)
        kind = type(self.norm).__name__
        return found or Decline("norm", "an RMS norm", kind, "It runs in plain MLX.")

    def launch(
        self, asked: RowProduct, device: Device, dtype: mx.Dtype, more: Text | None = None
    ) -> Piece | Decline:
        """A product of a row as a launch that finds its matrices in the joined arrays."""
        objection = row_product.check(asked)
        if objection is not None:
            return objection
        backend = row_product.backend_of(device)
        return row_product.build(asked, backend, device, dtype, join=True, joined=self.joined, more=more)

    def output(self, asked: RowProduct, device: Device, dtype: mx.Dtype) -> Run | Decline:
        """The output layer and the addition to the stream: ``(a, [gate,] x)`` to ``x + factor * branch``.

        Args:
            asked: the output layer's product, without the residual. The norm of the branch is the second
                module of the piece.
        """
        normed = self.post is not None
        asked = replace(asked, residual=not normed, multiplier=1.0 if normed else self.factor)
        product = self.launch(asked, device, dtype, routing.ZEROS if self.counted else None)
        if isinstance(product, Decline):
            return product

        def run(modules: Sequence[Any], a: Value, *rest: Value) -> tuple[Value, ...]:
            made = launched(product, {"x": a, "gate": rest[0], "residual": rest[-1]})
            y, zeros = made["y0"], made.get("cleared")
            if normed:
                return self._joined(viewed(rest[-1]), viewed(y), modules[1:], zeros)
            return (y,) if zeros is None else (y, zeros)

        return run
