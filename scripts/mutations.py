"""Mistakes that a family file could hold: each of its literals changed, one at a time.

Booleans are flipped, numbers scaled, enums put to each neighbour, names misspelled or swapped with the next
one, orders swapped, entries of lists and maps dropped. Text for people and the sizes of the tiny model
(`reference`, `notes`, `example`, ...) are no part of the mathematics and stay.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml

from mlx_experts.registry.catalog.shorthand import (
    ALONE,
    EXTENDS,
    REFERENCE,
    SIZE,
    VERBATIM,
    merge,
    standard_values,
)
from mlx_experts.registry.checks.known_names import ACTIVATIONS, CONFIG_NAMES
from mlx_experts.registry.spec.values import Spec

Path = tuple[str | int, ...]
PROSE = frozenset({"family", "extends", "reference", "notes", "example", "kept"})
"""Keys whose text is for people, names the file, or sizes the tiny model."""
UNORDERED = frozenset(
    {"model_types", "architectures", "ignore", "ignore_unused", "optional", "uncentred", "blocks", "only"}
)
"""Lists whose order says nothing."""
_OF_A_REFERENCE = frozenset({"default", "if_null", "present", "from", "only", "map"})
_TYPES = frozenset({"is", "otherwise", "first", "last", "tail", "types", "type"})
_NEXT_ACTIVATION = {
    "silu": "gelu",
    "gelu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_tanh": "gelu",
    "reglu": "geglu",
    "relu2": "silu",
    "swiglu": "geglu",
    "geglu": "swiglu",
    "geglu_tanh": "geglu",
    "geglu_plus_one": "geglu",
    "situ": "swiglu",
    "swiglu_oai": "swiglu",
    "swiglu_clamp_before": "swiglu_clamp_after",
    "swiglu_clamp_after": "swiglu_clamp_before",
}
_ALONE_IN_AN_ENUM: dict[tuple[str, str], Any] = {("offset", "last"): 0, ("multiplier", "sqrt_hidden"): 1.0}
_SMALL = 1e-12
"""Below this an epsilon only guards a division, so that a doubled one is no mistake, and none is one."""


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Args:
        at: the key path of the literal.
        what: the change, in words.
        data: the file's content with the mistake.
    """

    at: Path
    what: str
    data: dict[str, Any]

    @property
    def name(self) -> str:
        """Where and what, in one line; no two mutations of a file share it."""
        return f"{'.'.join(map(str, self.at))}: {self.what}"

    @property
    def key(self) -> str:
        """The same without places in lists, which move when an entry is added."""
        return f"{'.'.join(part for part in self.at if isinstance(part, str))}: {self.what}"


def mutations(data: dict[str, Any]) -> Iterator[Mutation]:
    """Every mistake of a file's content, in the order of the file.

    Standard values are written out and joined steps taken apart first, so that each family is tried with what
    it says, however short.
    """
    data = written_out(data)
    types = [str(name) for name in data.get("variants", {})]
    for at, what, value in _of_mapping(data, (), types):
        changed = copy.deepcopy(data)
        place: Any = changed
        for key in at[:-1]:
            place = place[key]
        if value is _DROPPED:
            del place[at[-1]]
        else:
            place[at[-1]] = value
        yield Mutation(at, what, changed)


def written_out(data: dict[str, Any]) -> dict[str, Any]:
    """The content without names of standard values, and with one path in each step of the conversions."""
    own = data.get("define", {})
    data = {key: value if key in VERBATIM else _named(value, own) for key, value in data.items()}
    if "define" in data:
        data["define"] = _apart(data["define"])
    checkpoint = data.get("checkpoint")
    if isinstance(checkpoint, dict) and "define" in checkpoint:
        checkpoint = {**checkpoint, "define": _apart(checkpoint["define"])}
        data = {**data, "checkpoint": checkpoint}
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("conversions"), list):
        return data
    steps = [single for step in checkpoint["conversions"] for single in _single(step)]
    return {**data, "checkpoint": {**checkpoint, "conversions": steps}}


def _apart(values: dict[str, Any]) -> dict[str, Any]:
    """Named values with one path in each step; a list of other things holds no steps."""
    return {
        key: [single for step in value for single in _single(step)] if isinstance(value, list) else value
        for key, value in values.items()
    }


def _named(value: Any, own: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        plain = {key: _named(each, own) for key, each in value.items() if key != EXTENDS}
        if EXTENDS not in value:
            return plain
        if not _standard(value[EXTENDS], own):
            return {EXTENDS: value[EXTENDS], **plain}
        return merge(_whole(_named(value[EXTENDS], own)), _whole(plain))
    if isinstance(value, list):
        return [_named(each, own) for each in value]
    return _named(copy.deepcopy(standard_values()[value[1:]]), own) if _standard(value, own) else value


def _standard(value: Any, own: dict[str, Any]) -> bool:
    """Whether a value is the name of a standard value."""
    text = value if isinstance(value, str) else ""
    return text.startswith("$") and text[1:] in standard_values() and text[1:] not in own


def _whole(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {ALONE[key]: each} if key in ALONE and isinstance(each, str | bool) else each
        for key, each in section.items()
    }


def _single(step: Any) -> Iterator[Any]:
    paths = next((v for v in step.values() if isinstance(v, dict | list)), None) if _joins(step) else None
    if paths is None:
        yield step
        return
    verb = next(key for key, each in step.items() if each is paths)
    rest = {key: each for key, each in step.items() if key != verb}
    for path in paths:
        yield {verb: path, **({"to": paths[path]} if isinstance(paths, dict) else {}), **rest}


def _joins(step: Any) -> bool:
    return isinstance(step, dict) and "to" not in step and "plugin" not in step


_DROPPED = object()
Change = tuple[Path, str, Any]


def _of(value: Any, at: Path, types: list[str]) -> Iterator[Change]:
    """Changes of whatever stands at a path."""
    if isinstance(value, dict):
        yield from _of_mapping(value, at, types)
    elif isinstance(value, list):
        yield from _of_list(value, at, types)
    elif value is None:
        yield at, "null left out", _DROPPED
    else:
        for what, new in _of_scalar(value, at, types):
            yield at, what, new


def _of_mapping(value: dict[Any, Any], at: Path, types: list[str]) -> Iterator[Change]:
    for key, each in value.items():
        if key not in PROSE or (at and at[-1] == "variants"):
            yield from _of(each, (*at, key), types)
    if at and at[-1] in ("map", "dense_types", "mlp_variants"):
        for key in value:
            yield (*at, key), "dropped", _DROPPED
    if not at or at[-1] == "equals":
        return
    names = [key for key, each in value.items() if _is_name(each, (*at, key)) and key not in PROSE]
    for a, b in itertools.pairwise(names):
        if value[a] != value[b]:
            both = f"{a} {value[a]} and {b} {value[b]}"
            yield at, f"{both} swapped", {**value, a: value[b], b: value[a]}


def _of_list(value: list[Any], at: Path, types: list[str]) -> Iterator[Change]:
    for i, each in enumerate(value):
        if not (isinstance(each, str) and len(value) > 1 and at[-1] in (*UNORDERED, "from", "text_keys")):
            yield from _of(each, (*at, i), types)
    if len(value) > 1:
        for i, each in enumerate(value):
            again = f" ({i})" if each in value[:i] else ""
            yield at, f"without {_words(each)}{again}", value[:i] + value[i + 1 :]
    if at[-1] in UNORDERED or "full_precision" in at:
        return
    for i, (a, b) in enumerate(itertools.pairwise(value)):
        if a != b and not _independent(a, b):
            both = f"{i} and {i + 1}" if isinstance(a, dict) or isinstance(b, dict) else f"{a} and {b}"
            yield at, f"{both} swapped", [*value[:i], b, a, *value[i + 2 :]]


def _words(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _independent(a: Any, b: Any) -> bool:
    """Whether two conversions touch different tensors, so that their order says nothing."""
    if not (isinstance(a, dict) and isinstance(b, dict)) or "kind" in a:
        return False
    mine, other = (
        [
            n.rstrip("*").rstrip(".")
            for v in each.values()
            for n in (v if isinstance(v, list) else [v])
            if isinstance(n, str)
        ]
        for each in (a, b)
    )
    return not any(
        x.startswith(y) or y.startswith(x) or x.endswith(y) or y.endswith(x) for x in mine for y in other
    )


def _of_scalar(value: Any, at: Path, types: list[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield f"{_words(value)} -> {_words(not value)}", not value
    elif isinstance(value, int | float):
        new = _scaled(value)
        yield f"{value} -> {new}", new
    elif (reference := _reference(value, at)) is not None:
        yield from _of_reference(value, reference, at, types)
    elif not value.startswith("$"):
        for new in _other_words(value, at, types):
            yield f"{value or 'nothing'} -> {new}", new


def _scaled(value: int | float) -> int | float:
    if isinstance(value, int):
        return value + 1 if value in (0, 1) else -value if value < 0 else value * 2
    if value == float("inf"):
        return 10.0
    return 1.0 if value == 0 else 0.0 if abs(value) < _SMALL else value * 2


def _reference(value: str, at: Path) -> re.Match[str] | None:
    if value.startswith(("config.", "outer.")):
        return REFERENCE.fullmatch(value)
    return SIZE.fullmatch(value) if at[0] == "config" else None


def _of_reference(value: str, match: re.Match[str], at: Path, types: list[str]) -> Iterator[tuple[str, str]]:
    whole = match.re is REFERENCE
    head = f"{match[1]}." if whole else ""
    keys, default = match[2 if whole else 1].split(" or "), match[3 if whole else 2]
    tail = "" if default is None else f" else {default}"
    write = lambda names, end=tail: f"{head}{' or '.join(names)}{end}"  # noqa: E731
    if len(keys) == 1:
        yield f"{value} of another key", write([f"{keys[0]}_x"])
    else:
        for i, key in enumerate(keys):
            yield f"{value} without {key}", write(keys[:i] + keys[i + 1 :])
        for i in range(len(keys) - 1):
            swapped = [*keys[:i], keys[i + 1], keys[i], *keys[i + 2 :]]
            yield f"{value} with {keys[i]} after {keys[i + 1]}", write(swapped)
    stated = yaml.safe_load(default) if default is not None else None
    if stated is not None:
        others = (
            _other_words(stated, at, types)
            if isinstance(stated, str)
            else [new for _, new in _of_scalar(stated, at, types)]
        )
        for new in others:
            yield f"{value} with {_words(new)}", write(keys, f" else {_words(new)}")


def _other_words(value: str, at: Path, types: list[str]) -> Iterator[Any]:
    """What else could stand for a word: each neighbour of an enum, another type or activation, or a
    misspelling."""
    field = next((k for k in reversed(at) if isinstance(k, str) and k not in _OF_A_REFERENCE), "")
    field = ALONE.get(field, field)
    known = [words for words in enums().get(field, ()) if value in words]
    if known:
        yield from (word for word in known[0] if word != value)
    elif field in ("kind", "plugin", "select", "module", "cache", "fallbacks"):
        # A name that nothing offers is refused wherever it stands; these names choose code.
        return
    elif (field, value) in _ALONE_IN_AN_ENUM:
        yield _ALONE_IN_AN_ENUM[field, value]
    elif value in types and len(types) > 1 and ({*at} & {*_TYPES, "map", "dense_types"}):
        yield types[(types.index(value) + 1) % len(types)]
    elif value in ACTIVATIONS or value in CONFIG_NAMES:
        yield _NEXT_ACTIVATION[CONFIG_NAMES.get(value, value)]
    elif not value:
        yield "x"
    else:
        last = list(re.finditer(r"\w+", value))
        end = last[-1].end() if last else len(value)
        yield f"{value[:end]}_x{value[end:]}"


def _is_name(value: Any, at: Path) -> bool:
    """Whether a value is a plain name: no reference, no word of an enum, no text."""
    return (
        isinstance(value, str)
        and bool(value)
        and " " not in value
        and not value.startswith("$")
        and at[0] not in ("config", "define", "backbone", "when")
        and _reference(value, at) is None
        and not any(value in words for words in enums().get(str(at[-1]), ()))
        and at[-1] not in ("kind", "key", "select", "function", "over")
    )


@functools.cache
def enums() -> dict[str, list[tuple[str, ...]]]:
    """By field name, the sets of words that the schema knows for it."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for spec in _all_specs(Spec):
        for name, info in spec.model_fields.items():
            words = tuple(w for w in _literals(info.annotation) if isinstance(w, str))
            if len(words) > 1:
                found.setdefault(info.alias or name, []).append(words)
    return found


def _all_specs(base: type[Spec]) -> Iterator[type[Spec]]:
    for spec in base.__subclasses__():
        yield spec
        yield from _all_specs(spec)


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _literals(part)
