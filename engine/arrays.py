"""Reads a checkpoint's tensors into MLX arrays, shard by shard."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_experts.registry.checkpoint import Checkpoint


def load_arrays(
    checkpoint: Checkpoint, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, mx.array]:
    """All tensors of a checkpoint, unevaluated."""
    arrays: dict[str, mx.array] = {}
    assert checkpoint.folder is not None
    for i, file in enumerate(checkpoint.files):
        arrays.update(mx.load(str(checkpoint.folder / file)))
        if progress is not None:
            progress(i + 1, len(checkpoint.files), file)
    return arrays
