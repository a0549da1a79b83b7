"""What a decoder layer calls, bound once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.linear import OnRow
from mlx_experts.engine.layers.moe import MoE


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The modules of a decoder layer; None for what it has not.

    Args:
        mixer: ``(x, state, cache)`` to the mixer's branch.
        mlp: experts or a dense MLP.
        shared: a shared expert that lives in the layer and is handed to ``mlp``.
        output_norm: what follows ``mlp`` at once.
        factor: on both branches when they are added.
    """

    mixer: Any
    mlp: Any
    shared: nn.Module | None
    output_norm: Any
    pre_mixer: Any
    post_mixer: Any
    pre_mlp: Any
    post_mlp: Any
    factor: float = 1.0

    @property
    def feed(self) -> Callable[..., mx.array] | None:
        """``x`` to the MLP's branch, before its last norm."""
        mlp, norm = self.mlp, self.output_norm
        if self.shared is not None:
            mlp = partial(mlp, shared=self.shared)
        if norm is None:
            return mlp  # type: ignore[no-any-return]
        return lambda x: norm(mlp(x))

    @property
    def feed_row(self) -> OnRow | None:
        """As :attr:`feed` on the CPU for one float32 row [1, D] in memory, where there is such a form.

        It says None where ``feed`` has to be called.
        """
        if self.output_norm is not None or not isinstance(self.mlp, MoE):
            return None
        return self.mlp.row_form(self.shared)

    @property
    def usual(self) -> bool:
        """Whether there are both branches, with a norm before each and nothing after."""
        before = (self.mixer, self.mlp, self.pre_mixer, self.pre_mlp)
        after = self.post_mixer is self.post_mlp is None
        return all(part is not None for part in before) and after and self.factor == 1.0


def as_it_is(x: mx.array) -> mx.array:
    """What stands where there is no norm."""
    return x


def scaled(branch: mx.array, factor: float) -> mx.array:
    """``factor * branch``."""
    return branch if factor == 1.0 else branch * factor


def usual(pre_mixer: Any, mixer: Any, pre_mlp: Any, feed: Any) -> Callable[..., mx.array]:
    """Both branches with a norm before each, as one function."""

    def run(x: mx.array, state: Any, cache: Any) -> mx.array:
        x = x + mixer(pre_mixer(x), state, cache)
        return x + feed(pre_mlp(x))

    return run


def branch(
    pre: Callable[[mx.array], mx.array] | None,
    module: Callable[..., mx.array] | None,
    post: Callable[[mx.array], mx.array] | None,
    factor: float,
) -> Callable[..., mx.array]:
    """``x + factor * post(module(pre(x), ...))`` with the steps that there are."""
    if module is None:
        return lambda x, *_: x
    if pre is not None and post is None and factor == 1.0:
        return lambda x, *rest: x + module(pre(x), *rest)
    before, after = pre or as_it_is, post or as_it_is
    return lambda x, *rest: x + scaled(after(module(before(x), *rest)), factor)
