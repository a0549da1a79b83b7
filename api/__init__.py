"""Mixture-of-Experts models for MLX, one YAML file a family, with fused single-token decode.

The names below load on first use, so that ``import mlx_experts.registry`` never imports mlx.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME: dict[str, str] = {}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
