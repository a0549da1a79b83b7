"""The router's declared steps for one token on the CPU, compiled by numba; the plain-MLX router is its truth.

MLX spends about 10 µs on each of the eight or so small operations that this replaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.cpu.stacks import TRANSFORMED, evaluated
from mlx_experts.engine.kernels.cpu.start import unavailable
from mlx_experts.engine.kernels.request import Decline

if TYPE_CHECKING:
    from mlx_experts.engine.kernels.router_kernel import RouterSteps

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
NO_TILT = np.empty(0, np.float32)
_NORMALISE = ("none", "sum", "clamp")


class Routed:
    """One layer's router, ready for one token at a time."""

    def __init__(self, steps: RouterSteps) -> None:
        from mlx_experts.engine.kernels.cpu import token
        from mlx_experts.engine.kernels.cpu.intrinsics import bits

        self._route = token.route
        self.top_k, self.biased = steps.top_k, steps.bias
        self.how = (
            _SCORES.index(steps.score),
            token.WITHOUT_GROUPS.address if 1 < steps.groups > steps.keep_groups else 0,
            steps.groups,
            steps.keep_groups,
            steps.group_score == "top2_sum",
            _NORMALISE.index(steps.normalise),
            bits(steps.eps),
            bits(steps.scale),
        )

    def __call__(self, logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array] | Decline:
        """``logits`` ``[..., E]`` of one row to indices (uint32) and weights (float32) ``[..., K]``.

        The order is that of the falling biased scores, of equal ones the lower index first. A Decline inside
        a function transformation, which has no values to read.
        """
        wide, tilt = logits.astype(mx.float32), self.tilt(bias)
        if tilt is None or not evaluated(wide):
            return TRANSFORMED
        chosen, share = self.on_row(np.array(wide, copy=False).reshape(-1), tilt)
        shape = (*logits.shape[:-1], self.top_k)
        return mx.array(chosen.reshape(shape)), mx.array(share.reshape(shape))

    def tilt(self, bias: mx.array | None) -> np.ndarray | None:
        """What :meth:`on_row` takes for a bias ``[E]`` or none; None inside a function transformation."""
        if not self.biased or bias is None:
            return NO_TILT
        wide = bias.astype(mx.float32)
        return np.array(wide, copy=False).reshape(-1) if evaluated(wide) else None

    def on_row(self, logits: np.ndarray, tilt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As the call for float32 ``logits`` ``[E]`` in memory, to ``[1, K]`` each."""
        chosen, share = np.empty((1, self.top_k), np.uint32), np.empty((1, self.top_k), np.float32)
        self._route(logits, tilt, self.how, chosen[0], share[0])
        return chosen, share


def prepare(steps: RouterSteps) -> Routed | Decline:
    """The router of one layer on the CPU, or why this machine has none."""
    return unavailable() or Routed(steps)
