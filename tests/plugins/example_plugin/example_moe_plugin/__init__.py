"""A plugin like anybody's: one family in YAML, one router selection, one piece that it overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_experts.plugins.hookspecs import Override, hookimpl


@hookimpl
def add_families() -> list[Path]:
    """The folder beside this file."""
    return [Path(__file__).parent / "families"]


def even_shares(*, logits: mx.array, top_k: int, options: Any) -> tuple[mx.array, mx.array]:
    """The best experts, each with the same weight."""
    indices = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[..., :top_k]
    return indices, mx.full(indices.shape, 1.0 / top_k, dtype=mx.float32)


@hookimpl
def register_router_selections() -> dict[str, Any]:
    """One selection of our own, and our own in place of a built-in one."""
    return {"even_shares": even_shares, "sparsemixer": Override(even_shares)}
