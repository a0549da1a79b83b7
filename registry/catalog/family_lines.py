"""How a family file's values stand in lines: braces and brackets for plain values, blocks for the rest.

A mapping of plain values and lists of them stands in braces, a list of plain values in brackets. A mapping in
such a mapping stands in braces too where that saves lines, at one depth, and without a comment inside. A
section at the top of a file that takes several lines is a block.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

import yaml

from mlx_experts.registry.catalog.yaml_reader import LOADER

WIDTH = 100
"""Columns of a line."""
_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
_BRACKETS = re.compile(r"[\n,\[\]{}]")
_SHORT = 3
"""Lines that a list of mappings may take in brackets."""
_PIECE = re.compile(r'(?:"(?:\\.|[^"\\])*"|[^",]|,(?! ))+,?')
"""What stands between two commas that part values, with the second."""


@dataclass
class Node:
    """A value, and what is said about it: comment lines before it, and one in its line."""

    value: str | dict[str, Node] | list[Node]
    before: list[str] = field(default_factory=list)
    beside: str = ""
    parts: tuple[list[str] | None] | None = field(default=None, compare=False)
    """What :func:`_parts` has found, once lines are made of it and it changes no more."""

    @property
    def bare(self) -> bool:
        """Whether it can stand in braces or brackets: a plain value, or a list of such."""
        if isinstance(self.value, dict):
            return False
        plain = isinstance(self.value, str) or all(
            isinstance(each.value, str) and not each.before and not each.beside for each in self.value
        )
        return plain and not self.before and not self.beside


def entry(key: str, node: Node, indent: int) -> list[str]:
    """The lines of a key with its value."""
    return [*wrapped(node.before, indent), *_valued(f"{' ' * indent}{key}:", node, indent)]


def _valued(start: str, node: Node, indent: int) -> list[str]:
    """The lines of a value behind ``start``, which is a key with its colon or a dash."""
    flow = _flow(node)
    if flow is not None:
        line = f"{start} {flow}"
        if len(line) <= WIDTH:
            return _beside(line, node, indent)
        if isinstance(node.value, str):
            # A long text goes on in the next line; YAML reads the break as a space.
            plain = flow[:1] not in "\"'"
            folded = (
                textwrap.wrap(line.strip(), WIDTH - indent, subsequent_indent="  ", **_WHOLE)
                if plain
                else [line.strip()]
            )
            return [
                *_beside(" " * indent + folded[0], node, indent),
                *(" " * indent + each for each in folded[1:]),
            ]
        if (filled := _filled(start, node, indent)) is not None:
            return filled
    if isinstance(node.value, dict):
        block = _block(start, node, indent)
        braces = _nested(start, node, indent)
        return block if braces is None or len(braces) >= len(block) else braces
    assert isinstance(node.value, list)
    lines = _beside(start, node, indent)
    for each in node.value:
        lines += wrapped(each.before, indent + 2)
        lines += _valued(f"{' ' * (indent + 2)}-", each, indent + 2)
    brackets = _bracketed(start, node, indent)
    return lines if brackets is None or len(brackets) >= min(len(lines), _SHORT + 1) else brackets


def _block(start: str, node: Node, indent: int) -> list[str]:
    """A mapping with a line, or more, for each key."""
    assert isinstance(node.value, dict)
    lines = [line for key, each in node.value.items() for line in entry(key, each, indent + 2)]
    if start.endswith("-"):
        first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
        return [*lines[:first], f"{start} {lines[first].lstrip()}", *lines[first + 1 :]]
    return [*_beside(start, node, indent), *lines]


def _nested(start: str, node: Node, indent: int) -> list[str] | None:
    """A mapping with mappings of plain values in it, in braces; None where it cannot stand so."""
    parts = _parts(node, nested=True)
    # A step of several paths, a reference to several: the key alone says what the braces hold.
    if parts is None or node.beside or (start.endswith("-") and len(parts) == 3):
        return None
    line = f"{start} {parts[0]}{', '.join(parts[1:-1])}{parts[-1]}"
    if len(line) <= WIDTH:
        return [line]
    # What takes several lines at the top of a file is a section with keys to look for.
    return _packed(start, parts, indent) if indent else None


def _bracketed(start: str, node: Node, indent: int) -> list[str] | None:
    """A list of plain values and mappings of plain values in brackets; None where it cannot stand so."""
    parts = _parts(node, nested=True)
    return None if parts is None or node.beside else _packed(start, parts, indent)


def _flow(node: Node) -> str | None:
    """The value in one line, or None where it has parts of its own."""
    if isinstance(node.value, str):
        return node.value
    parts = _parts(node)
    return None if parts is None else "".join((parts[0], ", ".join(parts[1:-1]), parts[-1]))


def _parts(node: Node, *, nested: bool = False) -> list[str] | None:
    """What stands in brackets or braces, with them first and last; None where a part has parts of its own.

    Args:
        nested: a mapping may have mappings of plain values as parts.
    """
    if nested:
        return _found_parts(node, nested=True)
    if node.parts is None:
        node.parts = (_found_parts(node, nested=False),)
    return node.parts[0]


def _found_parts(node: Node, *, nested: bool) -> list[str] | None:
    match node.value:
        case list(items) if items and all(_mapping(each) for each in items):
            return [
                "[",
                *(
                    _inside(str(_flow(each))) if isinstance(each.value, str) else str(_flow(each))
                    for each in items
                ),
                "]",
            ]
        case list(items) if all(each.bare and isinstance(each.value, str) for each in items):
            return ["[", *(_inside(str(each.value)) for each in items), "]"]
        case dict(entries) if all(each.bare or (nested and _mapping(each)) for each in entries.values()):
            values = (_inside(v.value) if isinstance(v.value, str) else _flow(v) for v in entries.values())
            pairs = zip(entries, values, strict=True)
            return ["{", *(f"{_inside(key)}: {value}" for key, value in pairs), "}"]
    return None


def _mapping(node: Node) -> bool:
    """Whether it is a mapping of plain values that can stand in a line with others."""
    short = isinstance(node.value, str) or (isinstance(node.value, dict) and _parts(node) is not None)
    return short and not node.before and not node.beside


def _filled(start: str, node: Node, indent: int) -> list[str] | None:
    """A mapping or list of plain values over several lines; None where a part would not fit in one."""
    parts = _parts(node)
    loose = isinstance(node.value, list) and any(
        isinstance(each.value, dict) or " " in str(each.value) for each in node.value
    )
    return None if parts is None or node.beside or loose else _packed(start, parts, indent)


def _packed(start: str, parts: list[str], indent: int) -> list[str] | None:
    """Parts of brackets or braces over several lines; None where one has a piece that fits in no line.

    A part that is too long for a line starts in a line of its own and goes on further inside.
    """
    lines, line, glue, inside = [], f"{start} {parts[0]}", "", indent + 2
    for n, part in enumerate(parts[1:-1], 3):
        whole = part + ("," if n < len(parts) else parts[-1])
        broken = len(whole) > WIDTH - inside
        pieces = [piece.strip() for piece in _PIECE.findall(whole)] if broken else [whole]
        if broken and glue and n < len(parts):
            lines.append(line)
            line, glue = " " * inside, ""
        for i, piece in enumerate(pieces):
            if len(line) + len(glue) + len(piece) > WIDTH:
                lines.append(line)
                line, glue = " " * (inside + 2 * bool(i)), ""
                if len(line) + len(piece) > WIDTH:
                    return None
            line, glue = line + glue + piece, " "
        if broken and n < len(parts):
            lines.append(line)
            line, glue = " " * inside, ""
    return [*lines, line]


def _inside(text: str) -> str:
    """A plain value as it stands in brackets or braces."""
    return quoted(text) if _BRACKETS.search(text) and text[:1] not in "\"'" else text


def _beside(line: str, node: Node, indent: int) -> list[str]:
    """A line with the comment that stands in it, or after the comment where both are too long."""
    if not node.beside:
        return [line]
    both = f"{line}  {node.beside}"
    return [both] if len(both) <= WIDTH else [*wrapped([node.beside], indent), line]


def wrapped(comments: list[str], indent: int) -> list[str]:
    """Comment lines at an indentation; those that are too long continue in the next line."""
    lines = []
    for text in comments:
        if len(text) + indent <= WIDTH:
            lines.append(" " * indent + text)
        else:
            words = textwrap.wrap(text.lstrip("# "), WIDTH - indent - 2, **_WHOLE)
            lines += [f"{' ' * indent}# {line}" for line in words]
    return lines


def quoted(text: str) -> str:
    """A text as YAML reads it back, in quotes where it needs them."""
    plain = text == text.strip() and not _BRACKETS.search(text)
    if plain:
        try:
            plain = yaml.load(f"[{text}]", Loader=LOADER) == [text]
        except yaml.YAMLError:
            plain = False
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
