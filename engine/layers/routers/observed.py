"""What somebody may ask of a block's experts: to be told what is routed, and to have fewer of them."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlx_experts.engine.kernels.request import Device
from mlx_experts.engine.layers.router import BoundRouter


class RoutingObserver(Protocol):
    """Is told of every call of a block."""

    def routed(self, indices: mx.array, weights: mx.array) -> None:
        """What the router has picked: ``[..., K]`` each, identity experts included."""

    def applied(self, outputs: mx.array, indices: mx.array, weights: mx.array) -> None:
        """What each picked expert returns: ``[..., K, H]``, and its number and weight ``[..., K]``."""


class ObservedRouter(BoundRouter):
    """A bound router that tells what it picks.

    Args:
        bound: the router.
        observer: who is told.
    """

    def __init__(self, bound: BoundRouter, observer: RoutingObserver) -> None:
        self._bound, self._observer = bound, observer
        self.logits = bound.logits

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """As the router's."""
        indices, weights = self._bound(x)
        self._observer.routed(indices, weights)
        return indices, weights

    def on(self, device: Device, x: mx.array) -> tuple[mx.array, mx.array]:
        """As the router's."""
        indices, weights = self._bound.on(device, x)
        self._observer.routed(indices, weights)
        return indices, weights
