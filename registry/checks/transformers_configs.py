"""Which configurations of transformers have experts, read from their sources; nothing is imported.

A configuration class has experts where a field counts them, or where the text model that it holds has: a
model of speech or images around a decoder says no more of it than its model type.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

EXPERT_FIELDS = {
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "moe_topk",
    "top_k_experts",
}
_PARTS = ("sub_configs", "sub_configs_defaults")
# What these keys hold reads no text.
_TOWER = re.compile(r"vision|audio|image|speech|backbone|encoder")


@dataclass
class ConfigClass:
    """A configuration class as its source states it.

    Args:
        name: of the class.
        model_type: its own, or nothing.
        fields: names of its annotated fields.
        parts: classes and model types of the configurations that it holds, those of towers left out.
        bases: names of the classes that it extends.
    """

    name: str
    model_type: str = ""
    fields: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """Under which others hold it."""
        return {self.name, self.model_type} - {""}


def config_classes(path: Path) -> list[ConfigClass]:
    """The classes of a configuration file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [_read(node) for node in tree.body if isinstance(node, ast.ClassDef)]


def _read(node: ast.ClassDef) -> ConfigClass:
    found = ConfigClass(node.name, bases={base.id for base in node.bases if isinstance(base, ast.Name)})
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name, value = line.target.id, line.value
            found.fields.add(name)
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            name, value = line.targets[0].id, line.value
        else:
            continue
        if name == "model_type" and isinstance(value, ast.Constant):
            found.model_type = str(value.value)
        elif name in _PARTS and isinstance(value, ast.Dict):
            found.parts.update(_parts(value))
    return found


def _parts(table: ast.Dict) -> Iterator[str]:
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and _TOWER.search(str(key.value)):
            continue
        if isinstance(value, ast.Name):
            yield value.id
        elif isinstance(value, ast.Call):
            for stated in value.keywords:
                if stated.arg == "model_type" and isinstance(stated.value, ast.Constant):
                    yield str(stated.value.value)
                elif stated.arg == "config_class" and isinstance(stated.value, ast.Name):
                    yield stated.value.id


def classes_with_experts(folder: Path) -> dict[Path, list[ConfigClass]]:
    """The classes with experts of transformers' models folder, by configuration file."""
    files = {path: config_classes(path) for path in sorted(folder.glob("*/configuration_*.py"))}
    classes = [each for found in files.values() for each in found]
    having = {name for each in classes if each.fields & EXPERT_FIELDS for name in each.names}
    while (
        more := {name for each in classes if (each.parts | each.bases) & having for name in each.names}
        - having
    ):
        having |= more
    found = {path: [each for each in own if each.names & having] for path, own in files.items()}
    return {path: own for path, own in found.items() if own}
