"""Reads a family file with ``yaml.safe_load`` semantics and remembers the line of every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mlx_experts.registry.errors import SpecError

KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, tuple[str, int]]
# Both build plain data only; libyaml's is several times faster where PyYAML was built with it.
LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
SCHEMA_FILE = "family.schema.json"
"""The JSON Schema's file, which lies beside the bundled families in the repository and installed."""
# Past every size and scale that a family has; Python itself refuses to read numbers of thousands.
_DIGITS = 40
# The longest family has some 10 kB.
LARGEST_FILE = 1 << 20


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Parse one YAML mapping.

    Returns:
        The mapping, and for every key path the file name and line (from 1) where it stands.

    Raises:
        SpecError: the file cannot be read, is not YAML, repeats a key, uses anchors, merge keys or tags, or
            is not a mapping.
    """
    text = read_text(path)
    node, lines = parse(text, path)
    try:
        data: dict[str, Any] = LOADER("").construct_document(node)
    except yaml.YAMLError as error:
        raise not_yaml(error, path, text) from error
    except ValueError as error:
        # What has the form of a date and is none.
        raise SpecError("the family file is not valid YAML", where=str(path), found=str(error)) from error
    return data, lines


def read_value(text: str, where: str) -> Any:
    """A value that stands inside a line.

    Args:
        where: file and line, for errors.

    Raises:
        SpecError: as :func:`read_yaml`.
    """
    try:
        node = LOADER(text).get_single_node()
        if node is None:
            return None
        _walk(node, (), where.rpartition(":")[0], {}, set())
        return LOADER("").construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = str(error.problem) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise SpecError(
            "what stands behind `else` is no value",
            where=where,
            expected="a plain value of YAML",
            found=f"{text[:40]!r}: {what}",
        ) from error


def parse(text: str, path: Path) -> tuple[yaml.MappingNode, Lines]:
    """The YAML mapping that a text is, as PyYAML's nodes; otherwise as :func:`read_yaml`."""
    lines: Lines = {}
    try:
        node = LOADER(text).get_single_node()
        if node is not None:
            _walk(node, (), str(path), lines, set())
    except yaml.YAMLError as error:
        raise not_yaml(error, path, text) from error
    except RecursionError as error:
        raise SpecError("the family file is nested too deeply", where=str(path)) from error
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(
            "the family file is not a mapping",
            where=str(path),
            expected="keys such as `family:` and `moe:`",
            found="nothing"
            if node is None
            else "a list"
            if isinstance(node, yaml.SequenceNode)
            else "a value",
        )
    return node, lines


def read_text(path: Path) -> str:
    """The text of a family file.

    Raises:
        SpecError: it cannot be read, is longer than any family, or is not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise SpecError(
                "the family file is too long",
                where=str(path),
                expected=f"at most {LARGEST_FILE} bytes",
                found=f"{size} bytes",
            )
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError("the family file is not text", where=str(path), expected="UTF-8") from error
    except OSError as error:
        raise SpecError(
            "the family file cannot be read", where=str(path), found=str(error.strerror)
        ) from error


def not_yaml(error: yaml.YAMLError, path: Path, text: str) -> SpecError:
    """The error for a text that a YAML parser refused, at the line where it gave up."""
    what, where, hint = str(error), str(path), ""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = error.problem_mark.line
        what, where = str(error.problem), f"{path}:{line + 1}"
        bad = "".join(text.splitlines()[line : line + 1])
        if "\t" in bad[: len(bad) - len(bad.lstrip())]:
            hint = "indent with spaces; YAML takes no tabs"
        elif "tag" in what:
            hint = "write plain values; a family file has no tags"
        else:
            hint = "look at the indentation, the brackets and the colons of this line and the one before"
    return SpecError("the family file is not valid YAML", where=where, found=what, hint=hint)


def renumbered(lines: Lines, at: KeyPath, places: Sequence[Mapping[KeyPath, KeyPath]]) -> None:
    """Give the items of a list that was rewritten the lines of what they were made of, in place.

    Args:
        at: the list.
        places: for each item, by a key in it (nothing for the item itself) the key that was written.
    """
    depth = len(at)
    old = {key: place for key, place in lines.items() if key[:depth] == at and len(key) > depth}
    under: dict[KeyPath, list[KeyPath]] = {}
    for key in old:
        del lines[key]
        for end in range(depth + 1, len(key) + 1):
            under.setdefault(key[:end], []).append(key)
    for n, item in enumerate(places):
        for inner, source in item.items():
            for key in under.get(source, ()):
                lines[*at, n, *inner, *key[len(source) :]] = old[key]


def _walk(node: yaml.Node, at: KeyPath, file: str, lines: Lines, seen_nodes: set[int]) -> None:
    line = node.start_mark.line + 1
    if id(node) in seen_nodes:
        raise SpecError(
            "the family file uses an anchor",
            where=f"{file}:{line}",
            expected="plain values",
            hint="write the value out where `*` stands, or share it through `extends:`",
        )
    seen_nodes.add(id(node))
    if (
        len(node.value) > _DIGITS
        and isinstance(node, yaml.ScalarNode)
        and node.tag.endswith((":int", ":float"))
    ):
        raise SpecError(
            "a number is too long",
            where=f"{file}:{line}",
            expected=f"at most {_DIGITS} digits",
            found=node.value[:20] + "...",
        )
    lines.setdefault(at, (file, line))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                raise SpecError(
                    "the family file uses a merge key", where=f"{file}:{line}", hint="write the keys out"
                )
            if name in seen:
                raise SpecError(
                    "a key stands twice", where=f"{file}:{line}", found=name, hint="remove one of the two"
                )
            seen.add(name)
            lines[(*at, name)] = (file, line)
            _walk(value, (*at, name), file, lines, seen_nodes)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*at, i), file, lines, seen_nodes)
