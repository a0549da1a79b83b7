"""SparseMixer: each pick has a softmax of its own over the experts that come close to it (Liu et al. 2023).

Legend: E experts, K picks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.options import read_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.spec.values import Num, Spec


class SparseMixerOptions(Spec):
    """Options of the sparsemixer selection."""

    jitter: Num = Field(
        description="Half the relative gap to the best up to which an expert counts as close."
    )


def sparsemixer(*, logits: mx.array, top_k: int, options: Mapping[str, Any]) -> tuple[mx.array, mx.array]:
    """Two picks and their weights, after transformers' ``models/phimoe/modeling_phimoe.py`` at inference.

    The second pick does not see the first one, and the weights of the two need not sum to one.

    Args:
        logits: ``[..., E]``.
        top_k: picks; the method knows two.
        options: :class:`SparseMixerOptions`.

    Returns:
        Indices and weights, each ``[..., 2]``.

    Raises:
        ConfigError: another number of picks.
    """
    if top_k != 2:
        raise ConfigError(
            "sparsemixer routes each token to two experts",
            where="config.json or the family file",
            expected="2 experts a token",
            found=str(top_k),
        )
    gap = 2.0 * read_options(SparseMixerOptions, options, "the sparsemixer selection").jitter
    left, indices, weights = logits, [], []
    for _ in range(top_k):
        best = left.max(axis=-1, keepdims=True)
        index = mx.stop_gradient(mx.argmax(left, axis=-1, keepdims=True))
        scale = mx.maximum(mx.abs(logits), best)
        close = mx.where((best - logits) / scale > gap, -mx.inf, left)
        weights.append(mx.take_along_axis(mx.softmax(close, axis=-1, precise=True), index, axis=-1))
        indices.append(index)
        left = mx.put_along_axis(left, index, mx.array(-mx.inf, left.dtype), axis=-1)
    return mx.concatenate(indices, axis=-1), mx.concatenate(weights, axis=-1)


@hookimpl
def register_router_selections() -> dict[str, Any]:
    """The selection of Phi-3.5-MoE."""
    return {"sparsemixer": sparsemixer}
