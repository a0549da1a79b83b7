"""The one form of a family file: `registry fmt` writes it.

Keys stand in the schema's order, and values in lines as ``family_lines`` says. A simple reference stands as
`config.key else value`. Neighbouring conversions of one kind are one step. A blank line parts the mathematics
from the checkpoint. A comment stays with the key or the item that it stands before, or in the line of.
"""

from __future__ import annotations

import bisect
import functools
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from mlx_experts.registry.catalog.conversion_steps import INSIDE, KEEPING, RENAMING, STEPS
from mlx_experts.registry.catalog.family_lines import WIDTH, Node, entry, quoted, wrapped
from mlx_experts.registry.catalog.shorthand import EXTENDS, REFERENCE, SIZE, VERBATIM
from mlx_experts.registry.catalog.yaml_reader import SCHEMA_FILE, parse
from mlx_experts.registry.spec.attention import GqaSpec, PluginMixerSpec, WrittenMixer
from mlx_experts.registry.spec.checkpoint import VERBS, CheckpointSpec
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec
from mlx_experts.registry.spec.written import Written

EDITOR_WORDS = "# yaml-language-server: $schema="
"""What stands before the address of a JSON Schema in the line that editors read."""
_VARIANTS = dict[str, WrittenMixer]


def formatted(text: str, path: Path) -> str:
    """The text of a family file in the one form.

    Args:
        path: the file, for messages.

    Raises:
        SpecError: the text is no family file that could be read.
    """
    node, _ = parse(text, path)
    comments = _comments(text, node)
    head = [text for place, text, alone in comments if alone and place < node.start_mark.index]
    rest = [each for each in comments if each[0] > node.start_mark.index]
    tree, left = _tree(node, rest)
    _sorted(tree, Family, ())
    stated = next((line for line in head if line.startswith(EDITOR_WORDS)), None)
    if stated is None and (path.parent / SCHEMA_FILE).exists():
        stated = EDITOR_WORDS + SCHEMA_FILE
    first = [line for line in head if line != stated]
    assert isinstance(tree.value, dict)
    lines = [*([stated] if stated else []), *wrapped(first, 0)]
    for key, value in tree.value.items():
        if key == "checkpoint":
            lines.append("")
        lines += entry(key, value, 0)
    return "\n".join([*lines, *wrapped(left, 0)]) + "\n"


def _comments(text: str, node: yaml.Node) -> list[tuple[int, str, bool]]:
    """Every comment: where it stands, its text, and whether it has its line to itself."""
    plain: list[tuple[int, int]] = []
    _note_scalars(node, plain)
    plain.sort()
    found = []
    for line in re.finditer(r"[^\n]+", text):
        for match in re.finditer("#", line[0]):
            at = line.start() + match.start()
            before = bisect.bisect_right(plain, (at, len(text))) - 1
            if before < 0 or plain[before][1] <= at:
                found.append((at, text[at : line.end()].rstrip(), not line[0][: match.start()].strip()))
                break
    return found


def _note_scalars(node: yaml.Node, found: list[tuple[int, int]]) -> None:
    """Add from where to where each key and each plain value stands."""
    if isinstance(node, yaml.ScalarNode):
        found.append((node.start_mark.index, node.end_mark.index))
        return
    for each in node.value:
        for inner in each if isinstance(each, tuple) else (each,):
            _note_scalars(inner, found)


def _tree(node: yaml.Node, comments: list[tuple[int, str, bool]]) -> tuple[Node, list[str]]:
    """The document as nodes with their comments, and the comments that stand before nothing."""
    entries: list[tuple[int, int, Node]] = []

    def build(node: yaml.Node) -> Node:
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Node] = {}
            for key, value in node.value:
                slot = len(entries)
                entries.append((key.start_mark.index, key.start_mark.line, Node("")))
                mapping[_scalar(key)] = made = build(value)
                entries[slot] = (*entries[slot][:2], made)
            return Node(mapping)
        if isinstance(node, yaml.SequenceNode):
            items: list[Node] = []
            for item in node.value:
                slot = len(entries)
                entries.append((item.start_mark.index, item.start_mark.line, Node("")))
                items.append(build(item))
                entries[slot] = (*entries[slot][:2], items[-1])
            return Node(items)
        return Node(_scalar(node))

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
    return quoted(str(node.value))


def _sorted(node: Node, kind: Any, at: tuple[str, ...]) -> None:
    """Put keys in the schema's order and references in their short form, in place."""
    if isinstance(node.value, list):
        if len(at) == 2 and at[0] == "config" and node.bare:
            node.value = " or ".join(str(each.value) for each in node.value)
            return
        if "define" in at[:2] and any(map(_is_step, node.value)):
            kind, at = _fields(Written[CheckpointSpec])[STEPS[1]], STEPS
        for each in node.value:
            _sorted(each, kind, at)
        if at == STEPS:
            node.value = _joined(node.value)
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
    order = _order(model, () if at == () else (EXTENDS, INSIDE) if at == STEPS else (EXTENDS,))
    node.value = dict(sorted(node.value.items(), key=lambda item: order.get(item[0], len(order))))
    mapping = get_origin(kind) is dict
    for key, each in node.value.items():
        if isinstance(each.value, str):
            continue
        inner = fields.get(key, kind if mapping else Any)
        if at == () and key == "variants":
            inner = _VARIANTS
        elif model is None and mapping:
            inner = get_args(kind)[1]
        _sorted(each, inner, (*at, key))
    if model is not None and issubclass(model, Spec) and node.value.keys() == {model.alone}:
        (only,) = node.value.values()
        if only.bare and isinstance(only.value, str):
            node.value = only.value


def _is_step(node: Node) -> bool:
    """Whether an item of a named list can only be a conversion."""
    return isinstance(node.value, dict) and not VERBS.keys().isdisjoint(node.value)


def _joined(steps: list[Node]) -> list[Node]:
    """Neighbouring steps of a conversion that differ in their paths alone, as one step for all."""
    found: list[Node] = []
    for step in steps:
        _alone(step)
        before = found[-1] if found else None
        if before is None or step.before or not _took(before, step):
            found.append(step)
    return found


def _alone(step: Node) -> None:
    """Write a step that maps one path with `to`, in place."""
    verb = next((v for v in RENAMING if v in step.value), None) if isinstance(step.value, dict) else None
    if verb is None or not isinstance(step.value, dict) or "to" in step.value:
        return
    paths = step.value[verb].value
    if not isinstance(paths, dict) or len(paths) != 1:
        return
    ((path, name),) = paths.items()
    if not (name.before or name.beside or step.value[verb].before or step.value[verb].beside):
        written: dict[str, Node] = {}
        for key, value in step.value.items():
            written |= {key: Node(path), "to": name} if key == verb else {key: value}
        step.value = written


def _took(first: Node, second: Node) -> bool:
    """Whether the first step could take the paths of the second, in place."""
    if not (isinstance(first.value, dict) and isinstance(second.value, dict)):
        return False
    verb = next((v for v in (*RENAMING, *KEEPING) if v in first.value and v in second.value), None)
    if verb is None or first.beside or second.beside:
        return False
    ours, theirs = _paths(verb, first.value), _paths(verb, second.value)
    rest = [{k: v for k, v in step.items() if k not in (verb, "to")} for step in (first.value, second.value)]
    if ours is None or theirs is None or rest[0] != rest[1] or type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if not ours.keys().isdisjoint(theirs):
            return False
        paths: dict[str, Node] | list[Node] = {**ours, **theirs}
    else:
        paths = [*ours, *theirs]
    first.value = {k: Node(paths) if k == verb else v for k, v in first.value.items() if k != "to"}
    return True


def _paths(verb: str, step: dict[str, Node]) -> dict[str, Node] | list[Node] | None:
    """The paths of a step as one for several holds them; None where no such step can."""
    held = step[verb]
    if held.before or held.beside:
        return None
    if not isinstance(held.value, str):
        return held.value
    if "to" not in step:
        return [held] if verb in KEEPING else None
    return {held.value: step["to"]} if verb in RENAMING and not step["to"].before else None


def _lists(value: dict[str, Node]) -> tuple[dict[str, Any], ...]:
    """The rules that a key alone stands for."""
    key = value["key"].value if "key" in value else None
    plain: dict[str, Any] = {"kind": "list", "key": key}
    return plain, {**plain, "value": "sparse"}


def _short(value: dict[str, Node], at: tuple[str, ...]) -> str | None:
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


def _has_key(kind: Any, value: dict[str, Node]) -> bool:
    """Whether `from` is a key of the section itself."""
    model = _model(kind, value)
    return model is not None and model is not Ref and "from" in _fields(model)


@functools.cache
def _order(model: type[BaseModel] | None, first: tuple[str, ...]) -> dict[str, int]:
    """The place of each key of a section, with ``first`` before its own."""
    return {key: i for i, key in enumerate((*first, *_fields(model)))}


def _models(kind: Any) -> tuple[type[BaseModel], ...]:
    """The sections that a type takes."""
    # A type's own hash goes through all of its parts. What is kept keeps its identity.
    if id(kind) not in _MODELS:
        _MODELS[id(kind)] = kind, _found_models(kind)
    return _MODELS[id(kind)][1]


_MODELS: dict[int, tuple[Any, tuple[type[BaseModel], ...]]] = {}


def _found_models(kind: Any) -> tuple[type[BaseModel], ...]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return () if kind is Ref else (kind,)
    if get_origin(kind) is dict:
        return ()
    return tuple(model for each in get_args(kind) for model in _models(each))


def _model(kind: Any, value: dict[str, Node]) -> type[BaseModel] | None:
    """The section that a mapping is, of those that may stand there: the one that has most of its keys."""
    if kind is Ref:
        return Ref
    found = _models(kind)
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
