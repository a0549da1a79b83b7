"""Runs a pair of launches as one function of a token; shared by the CUDA and the Metal back-end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_experts.engine.kernels.pack import PackedExperts, Stack
from mlx_experts.engine.kernels.source import Backend, Launch, array_names


@dataclass(frozen=True)
class Pair:
    """Launches A and B and the float32 words between them."""

    up: Launch
    down: Launch
    words: int


def _arrays(*parts: tuple[str, Stack | None]) -> list[mx.array]:
    return [a for part, stack in parts if stack is not None for a in array_names(part, stack).values()]


@dataclass(eq=False)
class FusedPair:
    """One layer's experts as a function of one token (see ``FusedRun``); kernels are made once a top-k.

    Args:
        plan: the launches for a top-k.
        options: passed to every launch, for tests.
    """

    backend: Backend
    experts: PackedExperts
    dtype: mx.Dtype
    plan: Callable[[int], Pair]
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._up = _arrays(("gate", self.experts.gate), ("up", self.experts.up))
        self._down = _arrays(("down", self.experts.down))
        self._made: dict[tuple[int, tuple[int, ...]], tuple[Callable, Callable]] = {}

    def _make(self, top_k: int, shape: tuple[int, ...]) -> tuple[Callable, Callable]:
        pair = self.plan(top_k)
        index, f32 = mx.uint32, mx.float32
        up_types = [self.dtype, index, *(a.dtype for a in self._up), f32]
        down_types = [f32, index, f32, *(a.dtype for a in self._down), self.dtype]
        return (
            pair.up.make(self.backend, up_types, [(pair.words,)], **self.options),
            pair.down.make(self.backend, down_types, [shape], **self.options),
        )

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``x [..., H]`` (one row), ``indices`` and ``weights`` ``[..., K]`` to ``y`` like ``x``."""
        if indices.dtype != mx.uint32:
            indices = indices.astype(mx.uint32)
        if weights.dtype != mx.float32:
            weights = weights.astype(mx.float32)
        key = (indices.shape[-1], x.shape)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(*key)
        up, down = made
        (act,) = up([x, indices, *self._up])
        (y,) = down([act, indices, weights, *self._down])
        return y
