"""Picks what builds a plan's model: this package's decoder, or mlx-lm's with this package's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_experts.engine.backbone import backbone_class
from mlx_experts.engine.described import Described
from mlx_experts.engine.families import catalog
from mlx_experts.engine.model import Model, ModelArgs
from mlx_experts.registry.schema import Family


def model_class(family: Family) -> type[Described]:
    """The class of a family's models, which takes :class:`ModelArgs`."""
    return Model if family.backbone is None else backbone_class(family.backbone.module)


def build(args: ModelArgs) -> Described:
    """The model of a plan, with every parameter at its initial value.

    Raises:
        ConfigError: the config describes a model that cannot be.
        DeviceError: the model needs a device that this machine lacks.
    """
    return model_class(args.plan.family)(args)  # type: ignore[call-arg]


def get_model_classes(config: Mapping[str, Any]) -> tuple[type[Described], type[ModelArgs]]:
    """The classes for a config, in the form that ``mlx_lm.utils.load_model`` takes.

    Raises:
        RegistryError: no family describes the config.
    """
    return model_class(catalog().for_config(config)), ModelArgs
