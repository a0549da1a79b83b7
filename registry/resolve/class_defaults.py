"""What transformers' config classes give for keys that families need and a config.json may leave out.

A family file states the defaults that are worth reading. Every real config has sizes; what stands for them
where one has none is kept apart, in class_defaults.yaml, which scripts/class_defaults.py writes.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.catalog.yaml_reader import LOADER
from mlx_experts.registry.spec.values import Ref

_FILE = "class_defaults.yaml"


@functools.cache
def class_defaults() -> dict[str, dict[str, Any]]:
    """Values by `model_type` and config key."""
    text = resources.files("mlx_experts.registry.resolve").joinpath(_FILE).read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = yaml.load(text, Loader=LOADER) or {}
    return loaded


def class_default(ref: Ref, view: ConfigView) -> tuple[str, Any] | None:
    """The key and the class's value where all keys of a reference are absent, or None."""
    for level in view.levels:
        known = class_defaults().get(str(level.get("model_type")), {})
        for key in ref.keys:
            # A key that is there and null means null; one with a 0 that counts as absent was not left out.
            left_out = not view.is_null(key) and not (ref.zero_is_absent and view.get(key) is not None)
            if known.get(key) is not None and left_out:
                return key, known[key]
    return None
