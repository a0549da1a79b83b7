"""Picks what builds a plan's model: this package's decoder, or mlx-lm's with this package's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.mlx_lm_backbone import backbone_class
from mlx_experts.engine.models.model import Model, ModelArgs
from mlx_experts.registry.spec.family import Family


def model_class(family: Family) -> type[LanguageModel]:
    """The class of a family's models, which takes :class:`ModelArgs`."""
    return Model if family.backbone is None else backbone_class(family.backbone.module)


def build(args: ModelArgs) -> LanguageModel:
    """The model of a plan, with every parameter at its initial value.

    Raises:
        ConfigError: the config describes a model that cannot be.
        DeviceError: the model needs a device that this machine lacks.
    """
    return model_class(args.plan.family)(args)  # type: ignore[call-arg]


def get_model_classes(config: Mapping[str, Any]) -> tuple[type[LanguageModel], type[ModelArgs]]:
    """The classes for a config, in the form that ``mlx_lm.utils.load_model`` takes.

    Raises:
        RegistryError: no family describes the config.
    """
    return model_class(catalog().for_config(config)), ModelArgs
