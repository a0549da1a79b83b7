"""What a residual form provides: a frame around the layers, and one site around each branch.

Legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.base_mixer import Piece
from mlx_experts.registry.resolve.planner import LayerPlan

Branch = Literal["mixer", "mlp"]


class Site(Piece):
    """Reads one branch's input from the stream, and writes the branch's output into it."""

    # Inputs that one read may give.
    inputs = 1

    def read(self, stream: Any) -> tuple[Any, Any]:
        """The branch's input ``[B, L, D]`` (or a tuple of them), and what :meth:`write` needs again."""
        raise NotImplementedError

    def write(self, stream: Any, kept: Any, branch: mx.array) -> Any:
        """The stream after the branch ``[B, L, D]``."""
        raise NotImplementedError


class ResidualForm:
    """How one model's layers are joined; made once for a plan.

    A plain object: its leaves live in the decoder and its layers, under the names that checkpoints use.
    """

    @property
    def streams(self) -> int | None:
        """N where the stream is ``[B, L, N, D]``, else None."""
        return None

    def build(self, decoder: nn.Module) -> None:
        """Place what the frame has of its own in ``decoder``."""

    def begin(self, decoder: nn.Module, h: mx.array) -> Any:
        """The stream that the first layer reads, from embeddings ``[B, L, D]``."""
        return h

    def end(self, decoder: nn.Module, stream: Any) -> mx.array:
        """Hidden states ``[B, L, D]`` from the stream that the last layer leaves."""
        raise NotImplementedError

    def passes(self, index: int) -> int:
        """How often a layer runs in one forward pass; each pass has caches of its own."""
        return 1

    def run(self, decoder: nn.Module, count: int, stream: Any, step: Callable[[int, Any, int], Any]) -> Any:
        """The stream behind all layers.

        Args:
            count: number of layers.
            step: runs the layer of an index on a stream, with the cache of a pass.
        """
        for index in range(count):
            stream = step(index, stream, 0)
        return stream

    def site(self, layer: LayerPlan, branch: Branch) -> tuple[str, Site]:
        """The site of a layer's branch, and its path in the layer."""
        raise NotImplementedError
