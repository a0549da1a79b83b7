"""Names and layouts that real checkpoints have, written down apart from the family files.

`tests/data/disk_names.yaml` says by family which tensors are ignored, and in which spellings and layouts
files keep the text model. A checkpoint of a spelling is made here, of the module tree's own parameters and
without the family file, and must be read as those parameters.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import yaml
from mlx.utils import tree_flatten

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.weights.audit import audit
from mlx_experts.engine.weights.conversion import WeightConverter
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family

_FILE = Path(__file__).parent.parent / "data" / "disk_names.yaml"
Tensors = dict[str, mx.array]


@functools.cache
def disk_names() -> dict[str, Any]:
    """The data file."""
    found: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def _tiny(name: str) -> tuple[Tensors, dict[str, Any]]:
    """The parameters of a family's tiny model, and its config."""
    family = catalog().load(name)
    config = tiny_config(family)
    return dict(tree_flatten(build_tiny(family, config).parameters())), config


def _converter(family: Family) -> tuple[WeightConverter, Tensors]:
    parameters, config = _tiny(family.family)
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    return WeightConverter(resolve(family, config), shapes), parameters


def check_ignored(family: Family) -> None:
    """Listed tensors are ignored, and no parameter is.

    Raises:
        AssertionError: naming the first that is not.
    """
    wanted = disk_names().get(family.family, {}).get("ignored", ())
    if not wanted:
        return
    converter, parameters = _converter(family)
    for name in wanted:
        assert converter.ignored.rule(name) is not None, f"{name} is not ignored"
    for name in parameters:
        assert converter.ignored.rule(name) is None, f"{name} is ignored"


def spelled(parameters: Tensors, spelling: dict[str, Any]) -> Tensors:
    """A checkpoint of these parameters in a spelling.

    Args:
        spelling: `names` are patterns and replacements on the tree's names; `stack` joins gate and up of
            stacked experts into one tensor, `apart` gives each expert its own tensors, before that.
    """
    found = dict(parameters)
    if "apart" in spelling:
        found = _apart(found, **spelling["apart"])
    if "stack" in spelling:
        found = _stacked(found, **spelling["stack"])
    for pattern in spelling.get("kernels", ()):
        found = {n: v.swapaxes(1, 2) if re.search(pattern, n) else v for n, v in found.items()}
    for pattern, axis in spelling.get("joined", {}).items():
        found = _joined(found, pattern, axis)
    for pattern, new in spelling.get("names", {}).items():
        found = {re.sub(pattern, new, name): value for name, value in found.items()}
    for pattern in spelling.get("without", ()):
        found = {name: value for name, value in found.items() if not re.search(pattern, name)}
    return found


def _parts(container: str, names: list[str]) -> re.Pattern[str]:
    return re.compile(rf"^(.*\.){re.escape(container)}\.({'|'.join(map(re.escape, names))})\.(weight|bias)$")


def _apart(tensors: Tensors, tree: str, leaves: list[str], path: str, names: list[str]) -> Tensors:
    """One tensor an expert and projection: `path`.{expert}.{name}."""
    pattern, found = _parts(tree, leaves), {}
    for name, value in tensors.items():
        match = pattern.match(name)
        if match is None:
            found[name] = value
            continue
        for i, each in enumerate(value):
            found[f"{match[1]}{path}.{i}.{names[leaves.index(match[2])]}.{match[3]}"] = each
    return found


def _stacked(
    tensors: Tensors,
    tree: str,
    path: str,
    *,
    leaves: list[str],
    names: list[str],
    order: str = "gate_up",
    transposed: bool = False,
    suffix: str = "",
    bias: str = "_bias",
) -> Tensors:
    """All experts in two tensors: gate and up joined along the rows, and down."""
    pattern, found, gathered = _parts(tree, leaves), {}, {}
    for name, value in tensors.items():
        match = pattern.match(name)
        if match is None:
            found[name] = value
        else:
            gathered[match[1], match[2], match[3]] = np.array(value)
    for at, kind in {(a, k) for a, _, k in gathered}:
        parts = [gathered[at, leaf, kind] for leaf in leaves]
        if len(parts) == 3:
            gate, up, down = parts
            first, second = (up, gate) if order == "up_gate" else (gate, up)
            joined = np.concatenate([first, second], axis=1)
            if order == "interleaved":
                joined = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
            parts = [joined, down]
        for name, part in zip(names, parts, strict=True):
            turned = part.swapaxes(1, 2) if transposed and kind == "weight" else part
            end = suffix if kind == "weight" else bias
            found[f"{at}{path}.{name}{end}"] = mx.array(np.ascontiguousarray(turned))
    return found


def _joined(tensors: Tensors, pattern: str, axis: int) -> Tensors:
    """Tensors of one name but for the pattern's group (`(a|b|c)`), in the order of the alternatives."""
    match = re.search(r"\(([^()?]+)\)", pattern)
    assert match is not None, pattern
    words = match[1].split("|")
    finder, found, groups = re.compile(pattern), {}, {}
    for name, value in tensors.items():
        hit = finder.search(name)
        if hit is None:
            found[name] = value
        else:
            groups.setdefault(name[: hit.start(1)] + "+".join(words) + name[hit.end(1) :], {})[hit[1]] = value
    for name, parts in groups.items():
        found[name] = mx.concatenate([parts[word] for word in words], axis=axis)
    return found


def misread(family: Family, spelling: dict[str, Any]) -> list[str]:
    """Parameters that a checkpoint of a spelling does not give, or gives other values.

    Raises:
        TensorError: the checkpoint is refused.
    """
    converter, parameters = _converter(family)
    disk = spelled(parameters, spelling)
    kept, _ = converter.ignore(disk)
    got = converter.convert(kept).tensors
    missing = set(spelling.get("not_held", ()))
    audit({n: v for n, v in parameters.items() if n not in missing}, got).check("a spelling")
    return [n for n, v in parameters.items() if n not in missing and not mx.allclose(got[n], v).item()]


def check_spellings(family: Family) -> None:
    """Every listed spelling is read as the parameters that it was made of.

    Raises:
        AssertionError: naming what is not.
        TensorError: a spelling is refused.
    """
    for label, spelling in disk_names().get(family.family, {}).get("spellings", {}).items():
        wrong = misread(family, spelling)
        assert not wrong, f"{label}: {wrong[:4]}"
