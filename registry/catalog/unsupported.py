"""Mixture-of-Experts architectures that no family describes, each with the reason that a user is told."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata, resources
from typing import Any

import yaml

from mlx_experts.registry.catalog.yaml_reader import LOADER

_PACKAGES = ("mlx-experts", "mlx-lm", "transformers")


def unsupported() -> dict[str, str]:
    """Declared gaps: model type to the reason."""
    file = resources.files("mlx_experts.registry.catalog").joinpath("unsupported.yaml")
    data: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER) or {}
    return {str(name): str(reason) for name, reason in data.items()}


def declared_reason(model_types: Iterable[str]) -> tuple[str, str] | None:
    """The first of the model types that is a declared gap, and its reason; None where none is."""
    reasons = unsupported()
    return next(((name, reasons[name]) for name in model_types if name in reasons), None)


def versions_here() -> str:
    """The versions that a declared gap speaks of: this package's, and its neighbours' where installed."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
