"""Reads the free options of a plugin's piece into a model of the plugin's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec_errors import words_of
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
            f"the options of {where} are not right: {_wrong(first)}",
            where=f"options.{key}" if key else "options",
            expected=_expected(kind, first),
            found="" if first["type"] == "missing" else repr(first["input"])[:80],
        ) from error


def _wrong(error: Any) -> str:
    if error["type"] == "unknown_key":
        return f"unknown key '{error['ctx']['key']}'"
    return "a key is missing" if error["type"] == "missing" else "a value cannot be this"


def _expected(kind: type[Spec], error: Any) -> str:
    if error["type"] == "unknown_key":
        return f"one of {', '.join(kind.model_fields)}"
    return str(error["loc"][-1]) if error["type"] == "missing" else " or ".join(words_of([error]))
