"""Reads the free options of a plugin's piece into a model of its own, and holds sizes to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mlx_experts.registry.catalog.validation_errors import words_of
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.planner import LayerPlan
from mlx_experts.registry.spec.family import PluginMixerSpec
from mlx_experts.registry.spec.values import Spec

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
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise _refused(kind, options, where, error) from error


def _refused(kind: type[Spec], options: Mapping[str, Any], where: str, error: ValidationError) -> SpecError:
    found = error.errors()
    first, key = found[0], _key(options, found[0])
    if first["type"] == "unknown_key":
        wrong, expected = f"unknown key '{first['ctx']['key']}'", f"one of {first['ctx']['known']}"
    elif first["type"] == "missing":
        wrong, expected = "a key is missing", key
    else:
        wrong = "a value cannot be this"
        expected = " or ".join(words_of([each for each in found if _key(options, each) == key]))
    return SpecError(
        f"the options of {where} are not right: {wrong}",
        where=f"options.{key}" if key else "options",
        expected=expected,
        found="" if first["type"] == "missing" else repr(first["input"])[:80],
        hint="correct the family file, or the config key that it reads there",
    )


def _key(options: Any, error: Any) -> str:
    """Where an error lies, without the parts that name members of a union."""
    kept: list[str] = []
    for part in error["loc"]:
        inside = isinstance(part, int) and isinstance(options, list) and part < len(options)
        if inside or (isinstance(options, Mapping) and part in options):
            options = options[part]
            kept.append(str(part))
    return ".".join([*kept, str(error["loc"][-1])] if error["type"] == "missing" else kept)


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
            where="config.json or the family file" + ("" if layer is None else f", layer {layer}"),
            expected=f"a multiple of {parts}",
            found=str(whole),
        )
