"""What every mixer (attention and its likes) provides to a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.layers.versioned import VersionedModule


class Piece(VersionedModule):
    """A module of a layer that may hold leaves which a dtype cast must leave in float32."""

    float32_leaves: ClassVar[tuple[str, ...]] = ()


class Mixer(Piece):
    """A module that mixes information between tokens.

    Subclasses take ``(layer, plan)``, and make their own cache. ``fused`` is the argument of ``load``, which
    the layer hands on.
    """

    fused: bool | None = None
    # Whether the inputs of queries, keys and values may be given apart, as a tuple of three.
    takes_three: ClassVar[bool] = False

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        raise NotImplementedError

    @property
    def source(self) -> int | None:
        """The earlier layer whose keys or picks it reads, or None."""
        return None

    @property
    def may_forget(self) -> bool:
        """Whether it computes rightly where its cache no longer holds the oldest tokens."""
        return True

    def make_cache(self) -> Any:
        """A fresh cache, or None when the mixer keeps nothing."""
        raise NotImplementedError


class RecurrentMixer(Mixer):
    """A mixer that remembers arrays of fixed shapes, in three parts: projections, what mixes, the output.

    The parts are apart because one token's projections and output are launches of their own on a GPU, and
    because what mixes is then a function of arrays.
    """

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths of the linear layers that read the mixer's input."""
        return ("in_proj",)

    @property
    def output(self) -> str:
        """Path of the linear layer that makes what is added to the stream."""
        return "out_proj"

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, E].

        Args:
            rows: the projections [B, L, width], in the order of :attr:`inputs`.
            mask: [B, L], False where a batch is padded; None when every position is real.
            cache: an ``ArraysCache`` that is read and extended but not advanced, or None.
        """
        raise NotImplementedError

    def __call__(self, x: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """``x`` [B, L, D] to [B, L, D], reading and extending ``cache``."""
        rows = [find(self, path)(x) for path in self.inputs]
        out = self.mix(rows, state.recurrent_mask(x, cache), cache)
        if cache is not None:
            cache.advance(x.shape[1])
        y: mx.array = find(self, self.output)(out)
        return y

    def step(self, rows: Sequence[mx.array], memory: Sequence[mx.array]) -> list[mx.array]:
        """One token: what the output layer reads, and the new memory.

        Args:
            memory: the arrays of the cache.
        """
        cache = ArraysCache(size=len(memory))
        cache.cache = list(memory)
        return [self.mix(rows, None, cache), *cache.cache]

    def delta_step(self) -> DeltaStep | None:
        """The part between the linear layers as the GPU kernel of a gated delta net takes it, or None."""
        return None

    def make_cache(self) -> ArraysCache:
        """A fresh cache."""
        raise NotImplementedError
