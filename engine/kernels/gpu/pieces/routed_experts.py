"""The experts' launches over what the routing launch wrote: one input for row, indices, weights and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from mlx_experts.engine.kernels.gpu.joined import reading
from mlx_experts.engine.kernels.gpu.launch_pair import FusedPair, arrays_of
from mlx_experts.engine.kernels.gpu.pieces.packed import Value
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.source import Launch
from mlx_experts.engine.kernels.gpu.tiles import one_launch
from mlx_experts.engine.kernels.gpu.tiles.one_launch import One

# The experts' launches know these outputs of the routing launch by other names.
_NAMES = {"x": "normed", "indices": "chosen", "weights": "share", "state": "state"}


def build(experts: FusedPair, route: Piece, top_k: int) -> Callable[[mx.array], Value]:
    """The experts as a function of the array that ``route.run`` gives, to ``[1, 1, H]``.

    Args:
        experts: a layer's prepared launches, for CUDA.
        route: the layer's routing launch.
    """
    pair, words, dtype = experts.plan(top_k, False), mx.float32, experts.dtype
    (up, up_arrays), (down, down_arrays) = (_prepared(experts, each, route) for each in (pair.up, pair.down))
    shape = (1, 1, experts.experts.down.projection.rows)
    dtypes = [words, *(a.dtype for a in up_arrays), words]
    first = up.make(experts.backend, dtypes, [(pair.words,)], **experts.options)  # type: ignore[arg-type]
    dtypes = [words, words, *(a.dtype for a in down_arrays), dtype]
    second = down.make(experts.backend, dtypes, [shape], **experts.options)  # type: ignore[arg-type]

    def run(routed: mx.array) -> Value:
        (act,) = first([routed, *up_arrays])
        return second([routed, act, *down_arrays])[0]

    return run


def build_one(experts: FusedPair, one: One, route: Piece) -> Callable[[mx.array], Value]:
    """As :func:`build`, in one launch; ``route`` leaves the words that it needs."""
    launch = one_launch.build(experts.backend, experts.experts, one)
    launch, arrays = _prepared(experts, launch, route)
    dtypes = [mx.float32, *(a.dtype for a in arrays), experts.dtype]
    shape = (1, 1, one.request.down.rows)
    only = launch.make(experts.backend, dtypes, [shape], **experts.options)  # type: ignore[arg-type]
    return lambda routed: only([routed, *arrays])[0]


def _prepared(experts: FusedPair, launch: Launch, route: Piece) -> tuple[Launch, list[mx.array]]:
    """A launch after the routing, and the arrays that it reads beside what that wrote."""
    arrays = arrays_of(experts.experts)
    launch = after_routing(launch, route)
    launch, held = reading(launch, {name: arrays.get(name) for name in launch.inputs}, experts.joined)
    return launch, [array for array in held.values() if array is not None]


def after_routing(launch: Launch, route: Piece) -> Launch:
    """A launch that finds its row, indices and weights in the routing launch's array."""
    assert route.packed is not None
    named = [name for name in launch.inputs if name in _NAMES]
    finds = "".join(route.packed.places[_NAMES[name]].found(name, "me_routed") for name in named)
    rest = [name for name in launch.inputs if name not in named]
    return replace(launch, inputs=("me_routed", *rest), source=finds + launch.source)
