"""Runs a pair of launches as one function of a few tokens; shared by the CUDA and the Metal back-end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import ExpertWeights
from mlx_experts.engine.kernels.gpu.joined import Joined, reading
from mlx_experts.engine.kernels.gpu.source import Backend, Launch, down_arrays, up_arrays
from mlx_experts.engine.kernels.gpu.tiles.one_launch import One

_Step = Callable[..., mx.array]


@dataclass(frozen=True)
class Pair:
    """Launches A and B and the float32 words of one token between them."""

    up: Launch
    down: Launch
    words: int


def arrays_of(experts: ExpertWeights) -> dict[str, mx.array]:
    """Every array of a layer's stacks by the name that kernel text uses for it."""
    return up_arrays(experts) | down_arrays(experts)


@dataclass(eq=False)
class FusedPair:
    """One layer's experts as a function of a few tokens (see ``FusedRun``).

    Kernels are made once for a top-k and once more for several tokens, whatever their number.

    Args:
        plan: the launches for a top-k, and for several tokens where its second argument is true.
        one: the single launch for a token of that top-k, where that is better.
        joined: where launches find the arrays that lie in one.
        options: passed to every launch, for tests.
    """

    backend: Backend
    experts: ExpertWeights
    dtype: mx.Dtype
    plan: Callable[[int, bool], Pair]
    one: Callable[[int], One | None] = lambda top_k: None
    joined: Sequence[Joined] = ()
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._arrays = arrays_of(self.experts)
        self._made: dict[tuple[int, tuple[int, ...]], tuple[_Step, _Step]] = {}

    def _step(
        self, launch: Launch, tokens: list[mx.Dtype], shape: tuple[int, ...], out: mx.Dtype, count: int
    ) -> _Step:
        given = launch.inputs[: len(tokens)]
        named = dict.fromkeys(given) | {name: self._arrays[name] for name in launch.inputs[len(tokens) :]}
        launch, arrays = reading(launch, named, self.joined)
        held = [array for array in arrays.values() if array is not None]
        dtypes = [*tokens, *(a.dtype for a in held), out]
        run = launch.make(self.backend, dtypes, [shape], count, **self.options)
        return lambda *token: run([*token, *held])[0]

    def _make(self, top_k: int, shape: tuple[int, ...]) -> tuple[_Step, _Step]:
        count = prod(shape[:-1])
        pair, index, wide = self.plan(top_k, count > 1), mx.uint32, mx.float32
        return (
            self._step(pair.up, [self.dtype, index], (count * pair.words,), wide, count),
            self._step(pair.down, [wide, index, wide], shape, self.dtype, count),
        )

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``x [..., H]``, ``indices`` and ``weights`` ``[..., K]`` to ``y`` like ``x``."""
        if indices.dtype != mx.uint32:
            indices = indices.astype(mx.uint32)
        if weights.dtype != mx.float32:
            weights = weights.astype(mx.float32)
        key = (indices.shape[-1], x.shape)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(*key)
        up, down = made
        return down(up(x, indices), indices, weights)
