"""Says in the words of a family file what pydantic found wrong with it, and where it stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlx_experts.registry.catalog.yaml_reader import KeyPath, Lines
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec.values import PATH_WORDS

_WORDS = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "none_required": "null",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "bool_parsing": "true or false",
    "too_short": "a list that is not empty",
    "string_too_short": "text that is not empty",
}
_BOUNDS = {
    "greater_than": ("a number above", "gt"),
    "greater_than_equal": ("a number of at least", "ge"),
    "less_than": ("a number below", "lt"),
    "less_than_equal": ("a number of at most", "le"),
}
# PyYAML follows YAML 1.1, in which an exponent needs a point before it and a sign.
_LOOSE_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def spec_error(error: ValidationError, lines: Lines, path: Path, prefix: KeyPath = ()) -> SpecError:
    """The first thing that is wrong, as an error at its file and line.

    Args:
        lines: where each key stands; empty where that is not known.
        path: the family file.
        prefix: the key that was validated, where it was not the whole file.
    """
    errors = error.errors()
    first = errors[0]
    loc = _yaml_location((*prefix, *first["loc"]), lines, first["type"])
    key = ".".join(map(str, loc))
    if first["type"] == "unknown_key":
        return _unknown_key(first["ctx"], key, loc, lines, path)
    if first["type"] == "missing":
        return _missing(errors, loc, lines, path, prefix)
    here = [e for e in errors if _yaml_location((*prefix, *e["loc"]), lines, e["type"]) == loc]
    expected = words_of(here)
    more = f" ({len(errors) - len(here)} more are wrong)" if len(errors) > len(here) else ""
    return SpecError(
        f"'{key}' cannot be this{more}",
        where=at(lines, loc, path),
        expected=" or ".join(expected),
        found=repr(first["input"])[:120],
        hint=_hint(first["input"], expected),
    )


def words_of(errors: Sequence[Any]) -> list[str]:
    """What pydantic's errors about one value say it should be, each thing once."""
    words = list(dict.fromkeys(_wanted(e) for e in errors))
    if any(word.startswith("a number") for word in words):
        words = [word for word in words if word != "a whole number"]
    # A bound says more than the bare type does.
    return [word for word in words if not any(other.startswith(f"{word} ") for other in words)]


def at(lines: Lines, loc: KeyPath, path: Path) -> str:
    """File and line of a key, or of the nearest key above it."""
    while loc and loc not in lines:
        loc = loc[:-1]
    file, line = lines.get(loc, (str(path), 1))
    return f"{file}:{line}"


def _unknown_key(context: dict[str, Any], key: str, loc: KeyPath, lines: Lines, path: Path) -> SpecError:
    return SpecError(
        f"unknown key '{context['key']}'" + (f" in '{key}'" if key else ""),
        where=at(lines, (*loc, context["key"]), path),
        expected=f"one of {context['known']}",
        hint=f"did you mean '{context['near']}'?" if context["near"] else "remove the key",
    )


def _missing(errors: list[Any], loc: KeyPath, lines: Lines, path: Path, prefix: KeyPath) -> SpecError:
    missing = [
        _yaml_location((*prefix, *e["loc"]), lines, "missing") for e in errors if e["type"] == "missing"
    ]
    names = [str(other[-1]) for other in missing if other[:-1] == loc[:-1]]
    parent = ".".join(map(str, loc[:-1]))
    return SpecError(
        ("a key is missing" if len(names) == 1 else "keys are missing")
        + (f" in '{parent}'" if parent else ""),
        where=at(lines, loc[:-1], path),
        expected=", ".join(names),
        hint="" if parent else "state them, or name a family that has them with `extends:`",
    )


def _wanted(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "model_type" and context.get("class_name") == "Ref":
        return "a reference {from: key}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "union_tag_invalid":
        return f"{context['discriminator']} {context['expected_tags']}".replace("'", "")
    if kind == "string_pattern_mismatch":
        return PATH_WORDS[context["pattern"]]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{words} {context[key]:g}"
    message = str(error["msg"])
    return _WORDS.get(kind) or message.removeprefix("Value error, ").removeprefix("Input should be ")


def _hint(found: Any, expected: list[str]) -> str:
    if isinstance(found, str) and _LOOSE_NUMBER.fullmatch(found):
        return f"YAML reads {found} as text; write {float(found):.6e}".replace("000000e", "0e")
    if expected == ["text"] and isinstance(found, bool | int | float):
        return "put it in quotes"
    options = re.findall(r"'([^']+)'", " ".join(expected)) or re.split(r"[ ,]+", " ".join(expected))
    given = found.get("kind") if isinstance(found, dict) else found
    near = difflib.get_close_matches(given, options, n=1, cutoff=0.6) if isinstance(given, str) else []
    if near:
        return f"did you mean {near[0]}?"
    if expected == ["a list"]:
        return "put it in brackets: [a, b]"
    return "`registry schema` prints what each key takes"


def _yaml_location(loc: KeyPath, lines: Lines, kind: str) -> KeyPath:
    """Drop the parts of a pydantic location that name union members and not keys of the file."""
    kept: KeyPath = ()
    for i, part in enumerate(loc):
        absent = kind == "missing" and i == len(loc) - 1
        if not lines or (*kept, part) in lines or absent:
            kept = (*kept, part)
    return kept
