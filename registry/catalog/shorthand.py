"""What a family file may write in short: named values, references to config.json in one line, joined steps.

`$name` stands for what the section `define` gives that name, or standard_values.yaml. A list that stands so
in a list gives it all of its items; a mapping with `extends: $name` is that one with changes. `config.key` is
`{from: key}`, `config.key else value` is `{from: key, default: value}`, and `config.key or older_key else
value` is `{from: [key, older_key], default: value}`; in the section `config` every name is a key, so that the
word
`config.` is left out there. With `outer.` in the place of `config.` the whole config wins over nested text
settings. One step of a checkpoint's conversions may stand for several (``conversion_steps``).
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mlx_experts.registry.catalog.conversion_steps import STEPS, one_by_one
from mlx_experts.registry.catalog.yaml_reader import LOADER, KeyPath, Lines, read_value, renumbered
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec.values import is_reference

ALONE = {
    "activation": "name",
    "qk_norm": "over",
    "renormalize": "enabled",
    "rope": "style",
    "selection_bias": "path",
}
"""Sections of which one key may stand for the whole."""
VERBATIM = frozenset(
    (
        "family",
        "extends",
        "model_types",
        "architectures",
        "when",
        "text_keys",
        "reference",
        "example",
        "notes",
    )
)
"""Sections in which text is text."""
_KEYS = r"([A-Za-z_]\w*(?:\.\w+)*(?: or [A-Za-z_]\w*(?:\.\w+)*)*)"
REFERENCE = re.compile(rf"(config|outer)\.{_KEYS}(?: else (\S+))?")
SIZE = re.compile(rf"{_KEYS}(?: else (\S+))?")
EXTENDS = "extends"
"""The key, in a mapping, of the named mapping that it changes."""
STANDARD = "standard_values.yaml"
NAME = re.compile(r"\$([A-Za-z_]\w*)")


def spelled_out(data: dict[str, Any], names: dict[str, Any], lines: Lines, path: Path) -> dict[str, Any]:
    """A family mapping with every shorthand replaced by what it stands for.

    Args:
        names: what `$name` may stand for.
        lines: where each key stands; those of a named value are added where it is used.
        path: the family file, for messages.

    Raises:
        SpecError: nothing has the name, a named value needs itself, or a text is half a reference.
    """
    writer = _Writer(names, lines, path)
    return {
        key: value if key in VERBATIM or key == "define" else writer.full(value, (key,), ())
        for key, value in data.items()
    }


def _sections(mapping: dict[str, Any]) -> dict[str, Any]:
    """The mapping with every section whole, so that `extends` can change a part of it."""
    return {
        key: {ALONE[key]: value}
        if key in ALONE and value is not None and (is_reference(value) or not isinstance(value, dict | list))
        else value
        for key, value in mapping.items()
    }


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``change`` over ``base``: mappings are merged key by key, everything else is replaced.

    A mapping of another `kind`, or a config reference, replaces the old one whole.
    """
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        if isinstance(old, Mapping) and both and "from" not in value and "from" not in old:
            same_kind = "kind" not in value or value["kind"] == old.get("kind", value["kind"])
            result[key] = merge(old, value) if same_kind else value
        else:
            result[key] = value
    return result if change.get("kind", base.get("kind")) == base.get("kind") or not base else dict(change)


@functools.cache
def standard_values() -> dict[str, Any]:
    """The values that every family may name."""
    text = resources.files("mlx_experts.registry.catalog").joinpath(STANDARD).read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=LOADER)
    return loaded


class _Writer:
    def __init__(self, names: dict[str, Any], lines: Lines, path: Path) -> None:
        self.names, self.lines, self.path = names, lines, path

    def full(self, value: Any, at: KeyPath, within: tuple[str, ...]) -> Any:
        if at == ("checkpoint", "define"):
            return value
        if isinstance(value, dict):
            full = {k: self.full(v, (*at, str(k)), within) for k, v in value.items() if k != EXTENDS}
            free = is_reference(value) or not {"options", "map"}.isdisjoint(at) or at[:2] == STEPS
            own = full if free else _sections(full)
            return merge(self._extended(value[EXTENDS], at, within), own) if EXTENDS in value else own
        if isinstance(value, list):
            items = self._items(value, at, within)
            return one_by_one(items, self.lines) if at == STEPS else items
        if not isinstance(value, str):
            return value
        if value.startswith("$"):
            return self._named(value, at, within)
        if value.startswith(("config.", "outer.")):
            return self._reference(value, at)
        if at[0] == "config" and " " in value:
            return self._reference(f"config.{value}", at)
        return value

    def _items(self, value: list[Any], at: KeyPath, within: tuple[str, ...]) -> list[Any]:
        """A list with its items spelled out, and those of every named list in it."""
        items: list[Any] = []
        places: list[dict[KeyPath, KeyPath]] = []
        for i, each in enumerate(value):
            full = self.full(each, (*at, i), within)
            if isinstance(full, list) and isinstance(each, str):
                items += full
                places += [{(): (*at, i, n)} for n in range(len(full))]
            else:
                items.append(full)
                places.append({(): (*at, i)})
        if len(items) != len(value):
            renumbered(self.lines, at, places)
        return items

    def _extended(self, value: Any, at: KeyPath, within: tuple[str, ...]) -> dict[str, Any]:
        """The mapping that a mapping extends."""
        place = (*at, EXTENDS)
        named = isinstance(value, str) and value.startswith("$")
        found = self._named(value, at, within, place) if named else None
        if not isinstance(found, dict):
            raise SpecError(
                f"'{'.'.join(map(str, place))}' names no mapping",
                where=self._where(place),
                expected="the $name of a mapping",
                found=repr(value)[:80],
            )
        return found

    def _named(self, value: str, at: KeyPath, within: tuple[str, ...], place: KeyPath = ()) -> Any:
        match = NAME.fullmatch(value)
        name = match[1] if match else value[1:]
        names = {**standard_values(), **self.names}
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            raise SpecError(
                f"`define` has no '{name}'",
                where=self._where(place or at),
                expected=", ".join(f"${known}" for known in names),
                found=value,
                hint=f"did you mean '${near[0]}'?" if near else f"add `{name}:` to `define`",
            )
        if name in within:
            raise SpecError("a named value needs itself", where=self._where(place or at), found=value)
        start: KeyPath = ("checkpoint", "define", name)
        start = start if start in self.lines else start[1:]
        for inner, place in list(self.lines.items()):
            if inner[: len(start)] == start and len(inner) > len(start):
                self.lines.setdefault((*at, *inner[len(start) :]), place)
        return self.full(copy.deepcopy(names[name]), at, (*within, name))

    def _reference(self, value: str, at: KeyPath) -> Any:
        match = REFERENCE.fullmatch(value)
        if match is None or (match[3] or "").startswith(("config.", "outer.", "$")):
            raise SpecError(
                f"'{'.'.join(map(str, at))}' is no reference to config.json",
                where=self._where(at),
                expected="config.key, config.key else value, or config.key or other_key else value",
                found=value,
                hint="write what does not fit in one line as {from: key, default: value}",
            )
        stated: dict[str, Any] = {"from": match[2].split(" or ")}
        if match[1] == "outer":
            stated["outer"] = True
        if match[3] is not None:
            stated["default"] = read_value(match[3], self._where(at))
        return stated

    def _where(self, at: KeyPath) -> str:
        while at and at not in self.lines:
            at = at[:-1]
        file, line = self.lines.get(at, (str(self.path), 1))
        return f"{file}:{line}"
