"""What every mixer (attention and its likes) provides to a decoder layer."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx

from mlx_experts.engine.layers.forward_context import ForwardState
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
