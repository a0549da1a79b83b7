"""The one form of a family file: `registry fmt` writes it.

Keys stand in the schema's order. A mapping of plain values stands in braces, a list of them in brackets; any
other mapping and list is a block. A simple reference stands as `config.key else value`. A blank line parts
the mathematics from the checkpoint. A comment stays with the key or the item that it stands before,
or in the line of.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from mlx_experts.registry.catalog.shorthand import REFERENCE, SIZE, VERBATIM
from mlx_experts.registry.catalog.yaml_reader import LOADER, parse
from mlx_experts.registry.spec.attention import GqaSpec, PluginMixerSpec, WrittenMixer
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec
from mlx_experts.registry.spec.written import Written

WIDTH = 100
"""Columns of a line."""
EDITOR_WORDS = "# yaml-language-server: $schema="
"""What stands before the address of a JSON Schema in the line that editors read."""
SCHEMA_FILE = "family.schema.json"
"""The schema's file, which lies beside the bundled families in the repository and installed."""
_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
_BRACKETS = re.compile(r"[\n,\[\]{}]")


@dataclass
class _Node:
    """A value, and what is said about it: comment lines before it, and one in its line."""

    value: str | dict[str, _Node] | list[_Node]
    before: list[str] = field(default_factory=list)
    beside: str = ""

    @property
    def bare(self) -> bool:
        """Whether it can stand in braces or brackets: a plain value, or a list of such."""
        if isinstance(self.value, dict):
            return False
        plain = isinstance(self.value, str) or all(
            isinstance(each.value, str) and not each.before and not each.beside for each in self.value
        )
        return plain and not self.before and not self.beside


def formatted(text: str, path: Path) -> str:
    """The text of a family file in the one form.

    Args:
        path: the file, for messages.

    Raises:
        SpecError: the text is no family file that could be read.
    """
    node, _ = parse(text, path)
    comments = _comments(text)
    head = [text for place, text, alone in comments if alone and place < node.start_mark.index]
    rest = [each for each in comments if each[0] > node.start_mark.index]
    tree, left = _tree(node, rest)
    _sorted(tree, Family, ())
    stated = next((line for line in head if line.startswith(EDITOR_WORDS)), None)
    if stated is None and (path.parent / SCHEMA_FILE).exists():
        stated = EDITOR_WORDS + SCHEMA_FILE
    first = [line for line in head if line != stated]
    assert isinstance(tree.value, dict)
    lines = [*([stated] if stated else []), *_wrapped(first, 0)]
    for key, value in tree.value.items():
        if key == "checkpoint":
            lines.append("")
        lines += _entry(key, value, 0)
    return "\n".join([*lines, *_wrapped(left, 0)]) + "\n"


def _comments(text: str) -> list[tuple[int, str, bool]]:
    """Every comment: where it stands, its text, and whether it has its line to itself."""
    found = []
    end = 0
    for token in yaml.scan(text, Loader=LOADER):
        if token.start_mark.index > end:
            for match in re.finditer(r"#[^\n]*", text[end : token.start_mark.index]):
                at = end + match.start()
                alone = not text[text.rfind("\n", 0, at) + 1 : at].strip()
                found.append((at, match[0].rstrip(), alone))
        end = max(end, token.end_mark.index)
    return found


def _tree(node: yaml.Node, comments: list[tuple[int, str, bool]]) -> tuple[_Node, list[str]]:
    """The document as nodes with their comments, and the comments that stand before nothing."""
    entries: list[tuple[int, int, _Node]] = []

    def build(node: yaml.Node) -> _Node:
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, _Node] = {}
            for key, value in node.value:
                slot = len(entries)
                entries.append((key.start_mark.index, key.start_mark.line, _Node("")))
                mapping[_scalar(key)] = made = build(value)
                entries[slot] = (*entries[slot][:2], made)
            return _Node(mapping)
        if isinstance(node, yaml.SequenceNode):
            items: list[_Node] = []
            for item in node.value:
                slot = len(entries)
                entries.append((item.start_mark.index, item.start_mark.line, _Node("")))
                items.append(build(item))
                entries[slot] = (*entries[slot][:2], items[-1])
            return _Node(items)
        return _Node(_scalar(node))

    tree = build(node)
    left: list[str] = []
    for place, text, alone in comments:
        if alone:
            after = next((made for start, _, made in entries if start > place), None)
            (left if after is None else after.before).append(text)
        else:
            inside = [e for e in entries if e[0] < place]
            made = next(made for _, line, made in inside if line == inside[-1][1])
            made.beside = text
    return tree, left


def _scalar(node: yaml.Node) -> str:
    """A plain value as it is written again: as it stands, without quotes that it does not need."""
    if not isinstance(node, yaml.ScalarNode):
        return ""
    if not node.style:
        return str(node.value)
    return _quoted(str(node.value))


def _quoted(text: str) -> str:
    plain = text == text.strip() and not _BRACKETS.search(text)
    if plain:
        try:
            plain = yaml.safe_load(f"[{text}]") == [text]
        except yaml.YAMLError:
            plain = False
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _sorted(node: _Node, kind: Any, at: tuple[str, ...]) -> None:
    """Put keys in the schema's order and references in their short form, in place."""
    if isinstance(node.value, list):
        if len(at) == 2 and at[0] == "config" and node.bare:
            node.value = " or ".join(str(each.value) for each in node.value)
            return
        for each in node.value:
            _sorted(each, kind, at)
        return
    if isinstance(node.value, str) or (at and at[0] in VERBATIM):
        return
    if "from" in node.value and not _has_key(kind, node.value):
        short = _short(node.value, at)
        if short is not None:
            node.value = short
            return
        kind = Ref
    if (
        {k: v.value for k, v in node.value.items()} in _lists(node.value)
        and not node.before
        and not node.beside
    ):
        node.value = node.value["key"].value
        return
    model = _model(kind, node.value)
    fields = _fields(model)
    order = {key: i for i, key in enumerate(fields)}
    node.value = dict(sorted(node.value.items(), key=lambda item: order.get(item[0], len(order))))
    for key, each in node.value.items():
        inner = fields.get(key, kind if get_origin(kind) is dict else Any)
        if at == () and key == "variants":
            inner = dict[str, WrittenMixer]
        elif model is None and get_origin(kind) is dict:
            inner = get_args(kind)[1]
        _sorted(each, inner, (*at, key))
    if model is not None and issubclass(model, Spec) and node.value.keys() == {model.alone}:
        (only,) = node.value.values()
        if only.bare and isinstance(only.value, str):
            node.value = only.value


def _lists(value: dict[str, _Node]) -> tuple[dict[str, Any], ...]:
    """The rules that a key alone stands for."""
    key = value["key"].value if "key" in value else None
    plain: dict[str, Any] = {"kind": "list", "key": key}
    return plain, {**plain, "value": "sparse"}


def _short(value: dict[str, _Node], at: tuple[str, ...]) -> str | None:
    """A reference in one line, or None where it does not fit in one."""
    stated, default = value["from"], value.get("default")
    outer = "outer" in value and value["outer"].value == "true" and at[0] != "config"
    if not set(value) <= {"from", "default", *(["outer"] if outer else [])} or not all(
        each.bare for each in value.values()
    ):
        return None
    if default is not None and (
        not isinstance(default.value, str)
        or not default.value
        or '"' in default.value
        # What stands behind `else` is a literal.
        or default.value.startswith(("config.", "outer.", "$"))
    ):
        return None
    if isinstance(stated.value, dict):
        return None
    keys = stated.value if isinstance(stated.value, str) else " or ".join(str(k.value) for k in stated.value)
    text = keys if default is None else f"{keys} else {default.value}"
    text = text if at[0] == "config" else f"{'outer' if outer else 'config'}.{text}"
    if 2 * len(at) + len(at[-1]) + len(text) > WIDTH:
        return None
    return text if (SIZE if at[0] == "config" else REFERENCE).fullmatch(text) else None


def _has_key(kind: Any, value: dict[str, _Node]) -> bool:
    """Whether `from` is a key of the section itself."""
    model = _model(kind, value)
    return model is not None and model is not Ref and "from" in _fields(model)


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind is not Ref:
            yield kind
    elif get_origin(kind) is not dict:
        for each in get_args(kind):
            yield from _models(each)


def _model(kind: Any, value: dict[str, _Node]) -> type[BaseModel] | None:
    """The section that a mapping is, of those that may stand there: the one that has most of its keys."""
    if kind is Ref:
        return Ref
    found = list(_models(kind))
    if Written[GqaSpec] in found:
        other = "kind" in value and value["kind"].value != "gqa"
        return Written[PluginMixerSpec] if other else Written[GqaSpec]

    def fit(model: type[BaseModel]) -> tuple[bool, int]:
        tagged = "kind" in value and value["kind"].value in get_args(_fields(model).get("kind"))
        return tagged, len(value.keys() & _fields(model).keys())

    return max(found, key=fit, default=None)


@functools.cache
def _fields(model: type[BaseModel] | None) -> dict[str, Any]:
    if model is None:
        return {}
    return {info.alias or name: info.annotation for name, info in model.model_fields.items()}


def _entry(key: str, node: _Node, indent: int) -> list[str]:
    """The lines of a key with its value."""
    return [*_wrapped(node.before, indent), *_valued(f"{' ' * indent}{key}:", node, indent)]


def _valued(start: str, node: _Node, indent: int) -> list[str]:
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
        lines = [line for key, each in node.value.items() for line in _entry(key, each, indent + 2)]
        if start.endswith("-"):
            first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
            return [*lines[:first], f"{start} {lines[first].lstrip()}", *lines[first + 1 :]]
        return [*_beside(start, node, indent), *lines]
    assert isinstance(node.value, list)
    lines = []
    for each in node.value:
        lines += _wrapped(each.before, indent + 2)
        lines += _valued(f"{' ' * (indent + 2)}-", each, indent + 2)
    return [*_beside(start, node, indent), *lines]


def _flow(node: _Node) -> str | None:
    """The value in one line, or None where it has parts of its own."""
    if isinstance(node.value, str):
        return node.value
    parts = _parts(node)
    return None if parts is None else "".join((parts[0], ", ".join(parts[1:-1]), parts[-1]))


def _parts(node: _Node) -> list[str] | None:
    """What stands in brackets or braces, with them first and last; None where a part has parts of its own."""
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
        case dict(entries) if all(each.bare for each in entries.values()):
            values = (_inside(v.value) if isinstance(v.value, str) else _flow(v) for v in entries.values())
            return ["{", *(f"{key}: {value}" for key, value in zip(entries, values, strict=True)), "}"]
    return None


def _mapping(node: _Node) -> bool:
    """Whether it is a mapping of plain values that can stand in a line with others."""
    short = isinstance(node.value, str) or (isinstance(node.value, dict) and _parts(node) is not None)
    return short and not node.before and not node.beside


def _filled(start: str, node: _Node, indent: int) -> list[str] | None:
    """A mapping or list of plain values over several lines; None where a part would not fit in one."""
    parts = _parts(node)
    loose = isinstance(node.value, list) and any(
        isinstance(each.value, dict) or " " in str(each.value) for each in node.value
    )
    if parts is None or node.beside or loose:
        return None
    lines: list[str] = []
    line = f"{start} {parts[0]}"
    for i, part in enumerate(parts[1:-1]):
        last = i == len(parts) - 3
        room = WIDTH - (1 if not last else len(parts[-1]))
        glue = "" if line.endswith(parts[0]) and not lines else " " if line.strip() else ""
        if len(line) + len(glue) + len(part) > room:
            lines.append(line)
            line, glue = " " * (indent + 2), ""
            if len(line) + len(part) > room:
                return None
        line += glue + part + ("," if not last else parts[-1])
    return [*lines, line]


def _inside(text: str) -> str:
    """A plain value as it stands in brackets or braces."""
    return _quoted(text) if _BRACKETS.search(text) and text[:1] not in "\"'" else text


def _beside(line: str, node: _Node, indent: int) -> list[str]:
    """A line with the comment that stands in it, or after the comment where both are too long."""
    if not node.beside:
        return [line]
    both = f"{line}  {node.beside}"
    return [both] if len(both) <= WIDTH else [*_wrapped([node.beside], indent), line]


def _wrapped(comments: list[str], indent: int) -> list[str]:
    """Comment lines at an indentation; those that are too long continue in the next line."""
    lines = []
    for text in comments:
        if len(text) + indent <= WIDTH:
            lines.append(" " * indent + text)
        else:
            words = textwrap.wrap(text.lstrip("# "), WIDTH - indent - 2, **_WHOLE)
            lines += [f"{' ' * indent}# {line}" for line in words]
    return lines
