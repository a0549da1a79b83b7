"""A family in words, and the difference of two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.traits import differing
from mlx_experts.registry.spec.values import Ref, Spec

_IDENTITY = ("family", "extends", "reference", "model_types", "architectures", "when", "example", "notes")


def request(family: Family) -> dict[str, str]:
    """Every key that the family states, as `section.key` to the value in words; identity left out."""
    found: dict[str, str] = {}
    for name in Family.model_fields:
        if name not in _IDENTITY:
            found.update(_flatten(name, getattr(family, name)))
    return found


def _flatten(at: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Ref):
        yield at, reference(value)
    elif isinstance(value, Spec):
        for name in type(value).model_fields:
            yield from _flatten(f"{at}.{name}", getattr(value, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _flatten(f"{at}.{name}", item)
    elif isinstance(value, tuple | list) and any(isinstance(v, Spec | dict) for v in value):
        for i, item in enumerate(value):
            yield from _flatten(f"{at}[{i}]", item)
    else:
        yield at, plain(value)


def plain(value: Any) -> str:
    """A value as a person says it."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case tuple() | list():
            return ", ".join(map(str, value))
    return str(value)


def reference(ref: Ref) -> str:
    """A reference in words."""
    default = "" if ref.required else f", {plain(ref.default)} when absent"
    mapped = f", mapped {ref.map}" if ref.map else ""
    return f"config '{ref}'{default}{mapped}"


def difference(a: Family, b: Family) -> list[tuple[str, str, str]]:
    """Keys in which two families differ: (key, value of the first, value of the second).

    A section that only one of them has is one row.
    """
    first, second = request(a), request(b)
    rows: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    for key in [*first, *(k for k in second if k not in first)]:
        left, right = first.get(key), second.get(key)
        if left == right:
            continue
        section = _missing_section(key, first, second)
        if section is None:
            rows.append((key, left or "not stated", right or "not stated"))
        elif section not in seen:
            seen.add(section)
            rows.append((section, _summary(section, first), _summary(section, second)))
    return rows


def _missing_section(key: str, first: dict[str, str], second: dict[str, str]) -> str | None:
    """The shortest section around ``key`` that one side lacks or states as none."""
    parts = key.split(".")
    for i in range(1, len(parts)):
        section = ".".join(parts[:i])
        for side in (first, second):
            if side.get(section) == "none" or not any(k == section or k.startswith(section) for k in side):
                return section
    for side in (first, second):
        if side.get(key) == "none" and any(k.startswith(key + ".") for k in (*first, *second)):
            return key
    return None


def _summary(section: str, side: dict[str, str]) -> str:
    if section in side:
        return side[section]
    inside = {k[len(section) + 1 :]: v for k, v in side.items() if k.startswith(section + ".")}
    if not inside:
        return "none"
    told = [f"{k} {v}" for k, v in inside.items() if v not in ("none", "no", "0.0", "1.0", "1")]
    return "; ".join(told[:6])


def sentence(a: Family, b: Family) -> str:
    """`b` said by its difference from `a`, for people: what sets it apart in words, then key by key."""
    rows = difference(a, b)
    if not rows:
        return f"{b.family} is the same as {a.family}"
    apart = ", ".join(differing(a, b)) or "what the keys below say"
    told = [f"{key}: {right} (there {left})" for key, left, right in rows]
    return f"{b.family} is the same as {a.family} except: {apart}\n\nkey by key\n  " + "\n  ".join(told)
