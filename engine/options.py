"""Reads the free options of a plugin's piece into a model of its own, and holds sizes to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve import LayerPlan
from mlx_experts.registry.schema import PluginMixerSpec
from mlx_experts.registry.values import RESOLVED, Spec

O = TypeVar("O", bound=Spec)  # noqa: E741


def read_options(kind: type[O], options: Mapping[str, Any], where: str) -> O:
    """The options of a family file as an instance of ``kind``, whose fields say what a piece takes.

    Args:
        kind: the plugin's model.
        options: resolved options, config references already read.
        where: the piece they belong to, for messages.

    Raises:
        SpecError: a key is unknown or missing, or a value is of the wrong type.
    """
    try:
        return kind.model_validate(dict(options), context=RESOLVED)
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: "Ref" in each["loc"])
        key = ".".join(str(part) for part in first["loc"])
        raise SpecError(
            f"the options of {where} are not right: {first['msg']}",
            where=f"options.{key}" if key else "options",
            expected=f"one of {', '.join(kind.model_fields)}" if first["type"] == "unknown_key" else "",
            found="" if first["type"] == "missing" else repr(first["input"])[:80],
        ) from error


def mixer_options(kind: type[O], layer: LayerPlan, where: str) -> O:
    """The options of a layer's mixer that a plugin builds; otherwise as :func:`read_options`."""
    assert isinstance(layer.mixer, PluginMixerSpec)
    return read_options(kind, layer.mixer.options, where)


def check_parts(whole: int, parts: int, problem: str, layer: int | None = None) -> None:
    """Hold a size of the config to a multiple of another.

    Args:
        whole: what is cut into ``parts`` equal parts.
        problem: what cannot be, for the message.
        layer: index of the layer that it is of.

    Raises:
        ConfigError: something would be left over.
    """
    if whole % parts:
        raise ConfigError(
            problem,
            where="config.json" if layer is None else f"config.json, layer {layer}",
            expected=f"a multiple of {parts}",
            found=str(whole),
        )
