"""Mixture-of-Experts models for MLX, one YAML file a family, with fused single-token decode.

The names below load on first use, so that ``import mlx_experts.registry`` never imports mlx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_experts.engine.adopt import adopt
    from mlx_experts.engine.build import get_model_classes
    from mlx_experts.engine.generation import batch_generate, generate, stream_generate
    from mlx_experts.engine.loading import load, load_model, load_model_for_check, save_model
    from mlx_experts.engine.trace import trace

_HOME = {
    "adopt": "mlx_experts.engine.adopt",
    "batch_generate": "mlx_experts.engine.generation",
    "generate": "mlx_experts.engine.generation",
    "get_model_classes": "mlx_experts.engine.build",
    "load": "mlx_experts.engine.loading",
    "load_model": "mlx_experts.engine.loading",
    "load_model_for_check": "mlx_experts.engine.loading",
    "save_model": "mlx_experts.engine.loading",
    "stream_generate": "mlx_experts.engine.generation",
    "trace": "mlx_experts.engine.trace",
}

__all__ = [
    "adopt",
    "batch_generate",
    "generate",
    "get_model_classes",
    "load",
    "load_model",
    "load_model_for_check",
    "save_model",
    "stream_generate",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
