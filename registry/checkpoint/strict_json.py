"""Reads JSON that came from somewhere else: every way it can be wrong ends in one error naming the file."""

from __future__ import annotations

import json
import re
from typing import Any

from mlx_experts.registry.errors import CheckpointError

MAX_DEPTH = 64
"""Objects and lists may be nested this deep; no real config or index comes near it."""

_FLOAT_TAG = "__float__"
# transformers 5 writes non-finite numbers this way so that its files stay strict JSON.
_TAGGED_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


_COMMENT = re.compile(r"(?m)^\s*(//|#|/\*)|[,{\[]\s*//")
_TRAILING_COMMA = re.compile(r",\s*[}\]]")


class _Refused(ValueError):
    """Something that the json module itself lets pass."""


def short(value: object, limit: int = 80) -> str:
    """``repr`` of a value out of a file, cut to a length that fits in a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def kind_of(value: object) -> str:
    """What JSON calls a value: object, list, string, number, boolean or null."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names: dict[type, str] = {dict: "object", list: "list", str: "string"}
    return names.get(type(value), type(value).__name__)


def parse_object(raw: bytes, file: str, *, lenient: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: the bytes of the file; a UTF-8 byte order mark is passed over.
        file: the file's name, for messages.
        lenient: accept ``NaN`` and ``Infinity``, decode ``{"__float__": "Infinity"}``, and accept a key
            that is repeated with the same value: what people write into a config by hand.

    Raises:
        CheckpointError: the text is not UTF-8, not JSON, not an object, nested deeper than MAX_DEPTH, or
            repeats a key.
    """

    def constant(text: str) -> float:
        if not lenient:
            raise _Refused(f"the number {text}, which JSON does not have")
        return float(text)

    def pairs(items: list[tuple[str, Any]]) -> Any:
        result = dict(items)
        if len(result) != len(items):
            _check_repeats(items, lenient)
        if lenient and len(result) == 1 and isinstance(tag := result.get(_FLOAT_TAG), str):
            return _TAGGED_FLOATS.get(tag, result)
        return result

    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=constant, object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "A JSON file is not UTF-8 text.",
            where=file,
            expected="UTF-8",
            found=f"byte {raw[error.start]:#04x} at offset {error.start}",
            hint="Download the file again.",
        ) from None
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:
        raise CheckpointError(
            "A JSON file cannot be parsed.",
            where=file,
            expected="one JSON object",
            found=str(error) if raw.strip() else "an empty file",
            hint=_how_to_repair(raw),
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            "A JSON file does not hold an object.",
            where=file,
            expected="an object: { … }",
            found=f"a {kind_of(value)}: {short(value)}",
        )
    if _is_too_deep(value):
        raise _too_deep(file)
    return value


def _how_to_repair(raw: bytes) -> str:
    """What to do with a text that is no JSON, by the habit that it shows."""
    text = raw.decode("utf-8-sig", errors="replace")
    if _COMMENT.search(text):
        return "JSON has no comments: remove the lines that begin with // or #."
    if _TRAILING_COMMA.search(text):
        return "JSON has no comma before a closing bracket: remove it."
    if text.lstrip().startswith(("<!DOCTYPE", "<html", "version https://git-lfs")):
        return "This is a web page or a pointer and not the file: download the file itself."
    return "Download the file again, or repair it in an editor."


def _check_repeats(items: list[tuple[str, Any]], lenient: bool) -> None:
    """Two different entries leave the meaning to whoever reads last."""
    seen: dict[str, Any] = {}
    for key, value in items:
        if key in seen and not (lenient and seen[key] == value):
            raise _Refused(f"the key {short(key)} twice")
        seen[key] = value


def _is_too_deep(value: Any) -> bool:
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, list):
            if depth > MAX_DEPTH:
                return True
            pending.extend((child, depth + 1) for child in item if isinstance(child, dict | list))
    return False


def _too_deep(file: str) -> CheckpointError:
    return CheckpointError(
        "A JSON file is nested too deeply.",
        where=file,
        expected=f"at most {MAX_DEPTH} levels",
        hint="This is no config of a model; check where the file came from.",
    )
