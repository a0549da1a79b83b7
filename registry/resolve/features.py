"""Refuses configs that switch on what their family does not compute."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml
from pydantic import Field

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.catalog.yaml_reader import LOADER
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.tiny_config import config_keys
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Spec


class Feature(Spec):
    """What a config key switches on."""

    what: str = Field(description="The feature in words.")
    unless: tuple[Any, ...] = Field((), description="Values that switch it off, beside null.")
    only: tuple[Any, ...] | None = Field(None, description="The values that mean it; null for all others.")

    def is_on(self, value: Any) -> bool:
        """Whether a value of the key means the feature."""
        if value is None or value is False or value in self.unless:
            return False
        return self.only is None or value in self.only


@functools.cache
def features() -> dict[str, Feature]:
    """The declared features by config key."""
    text = (
        resources.files("mlx_experts.registry.resolve").joinpath("features.yaml").read_text(encoding="utf-8")
    )
    return {key: Feature.model_validate(value) for key, value in yaml.load(text, Loader=LOADER).items()}


def check_features(family: Family, view: ConfigView) -> None:
    """Compare what a config switches on with what the family reads.

    Raises:
        ConfigError: a feature is on and the family does not read its key.
    """
    if family.backbone is not None:
        return  # mlx-lm's own model reads the config
    switched = {key: value for key, f in features().items() if f.is_on(value := view.get(key))}
    read = config_keys(family) if switched else set()
    for key, value in switched.items():
        if key not in read:
            what = features()[key].what
            raise ConfigError(
                f"the family '{family.family}' does not have what '{key}' switches on: {what}",
                where=f"config.json, {key}",
                found=repr(value)[:80],
                hint="`model_type` and `architectures` may name an older model than this one is",
            )
