"""Turns encodings that MLX has no module for into weights or MLX's own planes, before layouts are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass
class Decoded:
    """Tensors without foreign encodings.

    Args:
        weights: by name on disk.
        quantization: MLX's quantisation entry for planes that stayed packed, or None.
        notices: remarks on what was dropped or converted.
    """

    weights: dict[str, mx.array]
    quantization: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)


def decode_encodings(arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> Decoded:
    """Decode what the config's quantisation says is encoded."""
    return Decoded(dict(arrays))
