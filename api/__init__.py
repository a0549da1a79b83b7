"""Mixture-of-Experts models for MLX, one YAML file a family, with fused single-token decode.

The names below load on first use, so that ``import mlx_experts.registry`` never imports mlx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_experts.engine.dispatch.trace import trace
    from mlx_experts.engine.loading.api import load, load_model, save_model
    from mlx_experts.engine.loading.generate import batch_generate, generate, stream_generate
    from mlx_experts.engine.models.adopt import adopt
    from mlx_experts.engine.models.factory import get_model_classes
    from mlx_experts.engine.tools.inspect import inspect
    from mlx_experts.engine.tools.routing import record_routing

    __version__: str

_HOME = {
    "adopt": "mlx_experts.engine.models.adopt",
    "batch_generate": "mlx_experts.engine.loading.generate",
    "generate": "mlx_experts.engine.loading.generate",
    "get_model_classes": "mlx_experts.engine.models.factory",
    "inspect": "mlx_experts.engine.tools.inspect",
    "load": "mlx_experts.engine.loading.api",
    "load_model": "mlx_experts.engine.loading.api",
    "record_routing": "mlx_experts.engine.tools.routing",
    "save_model": "mlx_experts.engine.loading.api",
    "stream_generate": "mlx_experts.engine.loading.generate",
    "trace": "mlx_experts.engine.dispatch.trace",
}

__all__ = [
    "__version__",
    "adopt",
    "batch_generate",
    "errors",
    "generate",
    "get_model_classes",
    "inspect",
    "load",
    "load_model",
    "record_routing",
    "save_model",
    "stream_generate",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    value: Any
    if name == "errors":
        return importlib.import_module("mlx_experts.errors")
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("mlx-experts")
        globals()[name] = value
        return value
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
