"""Chooses who computes a softmax attention: the CPU's kernel for many rows, or mlx-lm's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_experts.engine.dispatch import policy
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.kernels.cpu import stacks, start

_PARALLEL_FROM = 1 << 18  # products from which on all threads share the work
_NO_MASK, _NO_SINKS = np.empty((0, 0), np.bool_), np.empty(0, np.float32)


def attention(fused: bool | None) -> Callable[..., mx.array]:
    """mlx-lm's ``scaled_dot_product_attention``, with the CPU's kernel in its place where that can run.

    Args:
        fused: the argument of ``load``; None leaves the choice to the environment.
    """
    if current_device() != "cpu" or not policy.resolve("cpu", fused).enabled:
        usual: Callable[..., mx.array] = scaled_dot_product_attention
        return usual

    def attend(
        q: mx.array, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        """``q`` [B, h, L, d], ``k`` [B, g, S, d] and ``v`` [B, g, S, e] to [B, h, L, e]."""
        found = None
        if q.shape[0] * q.shape[2] > 1 and isinstance(k, mx.array) and current_device() == "cpu":
            found = _on_cpu(q, k, v, scale, mask, sinks)
        if found is not None:
            return found
        more = {} if sinks is None else {"sinks": sinks}
        made: mx.array = scaled_dot_product_attention(q, k, v, cache=cache, scale=scale, mask=mask, **more)
        return made

    return attend


def _on_cpu(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """The kernel's attention, or None where numba cannot run or the mask is of another kind."""
    causal = isinstance(mask, str)
    hides = isinstance(mask, mx.array)
    shape = (q.shape[2], k.shape[2])
    if causal and mask != "causal":
        return None
    if hides and (mask.dtype != mx.bool_ or mask.ndim > 4 or not _for_all_heads(mask, q.shape[0], shape)):
        return None
    if start.unavailable() is not None:
        return None
    wide = [t.astype(mx.float32) for t in (q, k, v, *([] if sinks is None else [sinks]))]
    # Only what depends on another is computed here: a mask may be shared by all layers.
    if not stacks.evaluated(*wide, *([mask] if hides else [])):
        return None
    from mlx_experts.engine.kernels.cpu.attention import attend_many

    (batch, heads, length, width), (_, groups, seen, depth) = q.shape, v.shape
    out = stacks.fresh((batch, length, heads, depth))
    start.run(
        attend_many,
        batch * heads * length * seen * width >= _PARALLEL_FROM,
        stacks.dot_function().address,
        (batch, heads, groups, length, seen),
        *map(stacks.rows_of, wide[:3]),
        np.float32(scale),
        seen - length if causal else -1,
        stacks.rows_of(mask) if hides else _NO_MASK,
        np.array(wide[3], copy=False).reshape(-1) if sinks is not None else _NO_SINKS,
        out.reshape(-1, depth),
    )
    return mx.array(out).swapaxes(1, 2).astype(q.dtype)


def _for_all_heads(mask: mx.array, batch: int, shape: tuple[int, int]) -> bool:
    """Whether a mask [..., L, S] is the same for every head, for one sequence or for each."""
    outer = (1,) * (4 - mask.ndim) + tuple(mask.shape[:-2])
    return tuple(mask.shape[-2:]) == shape and mask.ndim >= 2 and outer[0] in (1, batch) and outer[1] == 1
