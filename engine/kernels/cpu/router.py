"""The router's declared steps for one token on the CPU, compiled by numba; the plain-MLX router is its truth.

MLX spends about 10 µs on each of the eight or so small operations that this replaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels.cpu.stacks import TRANSFORMED, evaluated
from mlx_experts.engine.kernels.cpu.start import compiled, unavailable
from mlx_experts.engine.kernels.request import Decline

if TYPE_CHECKING:
    from mlx_experts.engine.kernels.router_kernel import RouterSteps

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_NORMALISE = ("none", "sum", "clamp")


class Routed:
    """One layer's router, ready for one token at a time."""

    def __init__(self, steps: RouterSteps) -> None:
        self._top_k, self._biased = steps.top_k, steps.bias
        self._before = (
            _SCORES.index(steps.score),
            steps.groups,
            steps.keep_groups,
            steps.group_score == "top2_sum",
            _NORMALISE.index(steps.normalise),
            np.float32(steps.eps),
            np.float32(steps.scale),
        )

    def __call__(self, logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array] | Decline:
        """``logits`` ``[..., E]`` of one row to indices (uint32) and weights (float32) ``[..., K]``.

        The order is that of the falling biased scores, of equal ones the lower index first. A Decline inside
        a function transformation, which has no values to read.
        """
        inputs = [logits.astype(mx.float32)]
        if self._biased and bias is not None:
            inputs.append(bias.astype(mx.float32))
        if not evaluated(*inputs):
            return TRANSFORMED
        values = [np.array(a, copy=False).reshape(-1) for a in inputs]
        shape = (*logits.shape[:-1], self._top_k)
        chosen, share = np.empty(shape, np.uint32), np.empty(shape, np.float32)
        nothing = np.empty(0, np.float32)
        compiled().route(
            values[0],
            values[1] if len(values) > 1 else nothing,
            *self._before,
            chosen.reshape(-1),
            share.reshape(-1),
        )
        return mx.array(chosen), mx.array(share)


def prepare(steps: RouterSteps) -> Routed | Decline:
    """The router of one layer on the CPU, or why this machine has none."""
    return unavailable() or Routed(steps)
