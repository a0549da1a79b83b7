"""Reads a family file with ``yaml.safe_load`` semantics and remembers the line of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mlx_experts.registry.errors import SpecError

KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, tuple[str, int]]
# Both build plain data only; libyaml's is several times faster where PyYAML was built with it.
_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Parse one YAML mapping.

    Returns:
        The mapping, and for every key path the file name and line (from 1) where it stands.

    Raises:
        SpecError: the file cannot be read, is not YAML, repeats a key, uses anchors or tags beyond
            plain data, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("cannot read the family file", where=str(path), found=str(error)) from error
    lines: Lines = {}
    try:
        loader = _LOADER(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
        if node is not None:
            _walk(node, (), path.name, lines)
    except yaml.YAMLError as error:
        raise SpecError("the family file is not valid YAML", where=str(path), found=str(error)) from error
    except RecursionError as error:
        raise SpecError("the family file is nested too deeply", where=str(path)) from error
    if not isinstance(data, dict):
        raise SpecError(
            "the family file is not a mapping",
            where=str(path),
            expected="keys such as `family:` and `moe:`",
            found=type(data).__name__,
        )
    return data, lines


def _walk(node: yaml.Node, at: KeyPath, file: str, lines: Lines) -> None:
    lines.setdefault(at, (file, node.start_mark.line + 1))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise SpecError("a key stands twice", where=f"{file}:{key.start_mark.line + 1}", found=name)
            seen.add(name)
            lines[(*at, name)] = (file, key.start_mark.line + 1)
            _walk(value, (*at, name), file, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*at, i), file, lines)
