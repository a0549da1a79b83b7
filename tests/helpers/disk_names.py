"""Names and layouts that real checkpoints have, written down apart from the family files.

`tests/data/disk_names.yaml` says by family which tensors are ignored, and in which spellings and layouts
files keep the text model. A checkpoint of a spelling is made here, of the module tree's own parameters and
without the family file, and must be read as those parameters.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import yaml
from mlx.utils import tree_flatten
from stated_settings import made

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.weights.audit import audit
from mlx_experts.engine.weights.conversion import WeightConverter
from mlx_experts.engine.weights.dequantize import decode_encodings
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.prediction import add_prediction_layer
from mlx_experts.registry.spec.family import Family

_FILE = Path(__file__).parent.parent / "data" / "disk_names.yaml"
Tensors = dict[str, mx.array]


@functools.cache
def disk_names() -> dict[str, Any]:
    """The data file."""
    found: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def _tiny(name: str, given: str = "{}") -> tuple[Tensors, dict[str, Any]]:
    """The parameters of a family's tiny model, with other settings as JSON, and its config."""
    family = catalog().load(name)
    config = made(family, json.loads(given))
    return dict(tree_flatten(build_tiny(family, config).parameters())), config


def _converter(family: Family, given: dict[str, Any] | None = None) -> tuple[WeightConverter, Tensors]:
    parameters, config = _tiny(family.family, json.dumps(given or {}))
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    return WeightConverter(resolve(family, config), shapes), parameters


def check_ignored(family: Family) -> None:
    """Listed tensors are ignored, also with prediction layers, and no parameter is.

    Raises:
        AssertionError: naming the first that is not.
    """
    for name in disk_names().get(family.family, {}).get("copies", ()):
        plan = add_prediction_layer(resolve(family, made(family, {"num_nextn_predict_layers": 1})))
        assert WeightConverter(plan, {}).ignored.rule(name) is not None, f"{name} is not ignored"
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
        spelling: `names` are patterns and replacements on the tree's names, applied in order; `layout` is
            how the experts lie, `kernels` are patterns of convolutions that are [C, 1, K] on disk, `lifted`
            of tensors that have a first axis of one there, `flat` of those with one axis, `numbered` are
            patterns of stacks whose rows lie apart and their names with `{e}` for the number, `joined` names
            of what lies in one matrix, by `groups` rows in turn, or `each` in turn, `absorbed` says that
            latent keys and values are one `kv_b_proj`, `rowed` are stacks whose last row is a single expert,
            with the path of that one, `shared` are patterns of what is the same in every layer, with its one
            name, `given` are other settings than the tiny config's, `lacking` patterns of parameters that
            files leave out and that are zeros, `surplus` names of tensors that files have and a model of
            these settings has not.
    """
    lacking = spelling.get("lacking", ())
    found = {n: v for n, v in parameters.items() if not any(re.search(each, n) for each in lacking)}
    found |= {name: mx.ones((1,)) for name in spelling.get("surplus", ())}
    layout = dict(spelling.get("layout", {}))
    if layout.pop("centred", False):
        # Originals keep the weights of norms as distances from one.
        found = {
            name: value - 1.0 if name.endswith("norm.weight") else value for name, value in found.items()
        }
    if layout:
        found = laid_out(found, **layout)
    for pattern in spelling.get("kernels", ()):
        found = {n: v.swapaxes(1, 2) if re.search(pattern, n) else v for n, v in found.items()}
    if spelling.get("absorbed"):
        found = _unabsorbed(found)
    for stack, single in spelling.get("rowed", {}).items():
        for name in [each for each in found if f".{stack}." in each]:
            last = found.pop(name.replace(stack, single))
            found[name] = mx.concatenate([found[name], last[None]])
    for pattern, new in spelling.get("shared", {}).items():
        found = {re.sub(rf"^.*{pattern}", new, name): value for name, value in found.items()}
    for pattern in spelling.get("lifted", ()):
        found = {n: v[None] if re.search(pattern, n) else v for n, v in found.items()}
    for pattern in spelling.get("flat", ()):
        found = {n: v.reshape(-1) if re.search(pattern, n) else v for n, v in found.items()}
    for joined, parts in spelling.get("joined", {}).items():
        found = _in_one(found, joined, parts, spelling.get("groups", {}).get(joined, 1))
    for pattern, new in spelling.get("numbered", {}).items():
        found = _apart(found, re.compile(pattern), new)
    for pattern, new in spelling.get("names", {}).items():
        found = {re.sub(pattern, new, name): value for name, value in found.items()}
    return found


def _unabsorbed(tensors: Tensors) -> Tensors:
    """Tensors with one matrix [heads (nope + v), rank] in the place of both that attention absorbs."""
    found = dict(tensors)
    for name in tensors:
        at, _, rest = name.rpartition(".embed_q.")
        if at and rest == "weight":
            queries, values = found.pop(name), found.pop(f"{at}.unembed_out.weight")
            rows = mx.concatenate([queries.swapaxes(1, 2), values], axis=1)
            found[f"{at}.kv_b_proj.weight"] = rows.reshape(-1, rows.shape[-1])
    return found


def _in_one(tensors: Tensors, joined: str, parts: list[str], groups: int | str) -> Tensors:
    """Tensors with the rows of neighbouring modules in one matrix, in this order within each group.

    Args:
        groups: how many there are; `each` for one row of every part, in matrices and stacks [..., R, C].
    """
    found = dict(tensors)
    for name in tensors:
        at, _, plane = name.rpartition(f".{parts[0]}.")
        if at:
            rows = [found.pop(f"{at}.{part}.{plane}") for part in parts]
            *lead, count, width = rows[0].shape if len(rows[0].shape) > 1 else (len(rows[0]), 1)
            if isinstance(groups, str):
                one = mx.stack(rows, axis=-2).reshape(*lead, count * len(rows), width)
            else:
                cut = [each.reshape(groups, -1, *each.shape[1:]) for each in rows]
                one = mx.concatenate(cut, axis=1).reshape(-1, *rows[0].shape[1:])
            found[f"{at}.{joined}.{plane}"] = one
    return found


def _apart(tensors: Tensors, pattern: re.Pattern[str], new: str) -> Tensors:
    """Tensors with every stack of a pattern as one tensor for each of its rows."""
    found: Tensors = {}
    for name, value in tensors.items():
        if match := pattern.fullmatch(name):
            found |= {match.expand(new).replace("{e}", str(e)): each for e, each in enumerate(value)}
        else:
            found[name] = value
    return found


def laid_out(
    tensors: Tensors,
    kind: str,
    tree: str,
    path: str,
    names: list[str],
    *,
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    order: str = "gate_up",
    transposed: bool = False,
    suffix: str = "",
    down_transposed: bool = False,
) -> Tensors:
    """Tensors with the stacked experts of a module tree laid out as a checkpoint has them.

    Args:
        kind: `per_expert`, `fused_per_expert`, `stacked`, `split` or `flat`.
        tree: the container in the tree, from the decoder layer.
        path: the container on disk, from the decoder layer.
        names: what it calls the projections.
        leaves: what the tree calls them.
        order: how gate and up are joined.
        transposed: matrices are [in, out].
        suffix: what follows the name of a joined matrix.
        down_transposed: of flat matrices, the last is stored as the others are.
    """
    pattern = re.compile(rf"^(.*\.)?{re.escape(tree)}\.({'|'.join(leaves)})\.(weight|bias)$")
    found: Tensors = {}
    gathered: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        match = pattern.match(name)
        if match is None:
            found[name] = value
        else:
            gathered.setdefault((match[1] or "", match[3]), {})[match[2]] = np.array(value)
    assert gathered, f"no experts at {tree}"
    for (at, plane), by_leaf in gathered.items():
        parts = [by_leaf[leaf] for leaf in leaves]
        if kind in ("stacked", "fused_per_expert") and len(parts) == 3:
            parts = [_joined(parts[0], parts[1], order), parts[2]]
        base = at + (f"{path}." if path else "")
        for i, (name, part) in enumerate(zip(names, parts, strict=True)):
            if transposed and plane == "weight":
                part = part.swapaxes(1, 2)
            if kind.endswith("per_expert"):
                found |= {f"{base}{e}.{name}.{plane}": mx.array(each) for e, each in enumerate(part)}
                continue
            if kind == "flat":
                turned = down_transposed and i == len(parts) - 1
                part = (part.swapaxes(1, 2) if turned else part).reshape(-1, part.shape[1 if turned else -1])
            end = suffix if plane == "weight" else f"{'' if suffix else '_'}{'.' if suffix else ''}bias"
            if kind in ("split", "flat") and not suffix:
                end = "" if kind == "flat" else f".{plane}"
            found[f"{base}{name}{end}"] = mx.array(np.ascontiguousarray(part))
    return found


def _joined(gate: np.ndarray, up: np.ndarray, order: str) -> np.ndarray:
    """Gate and up [E, F, ...] as one array [E, 2 F, ...]."""
    if order == "interleaved":
        return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
    return np.concatenate([up, gate] if order == "up_gate" else [gate, up], axis=1)


def misread(family: Family, spelling: dict[str, Any]) -> list[str]:
    """Parameters that a checkpoint of a spelling does not give, or gives other values.

    Raises:
        TensorError: the checkpoint is refused.
    """
    converter, parameters = _converter(family, spelling.get("given"))
    for pattern in spelling.get("shared", ()):
        parameters = _alike(parameters, pattern)
    disk = spelled(parameters, spelling)
    kept, _ = converter.ignore(disk)
    got = converter.convert(kept).tensors
    audit(parameters, got).check("a spelling")
    zero = {n for n in parameters if any(re.search(each, n) for each in spelling.get("lacking", ()))}
    alike = {n: mx.allclose(got[n], v * (n not in zero)) for n, v in parameters.items()}
    mx.eval(alike)
    return [n for n, same in alike.items() if not same.item()]


def _alike(parameters: Tensors, pattern: str) -> Tensors:
    """Parameters with those of a pattern that end alike being one and the same."""
    first: Tensors = {}
    found = dict(parameters)
    for name, value in parameters.items():
        if match := re.search(pattern, name):
            found[name] = first.setdefault(match[0], value)
    return found


def misread_blocks(family: Family, layout: dict[str, Any]) -> list[str]:
    """Planes that mxfp4 stacks in a layout, 16 bytes of a group on an axis, do not give.

    Raises:
        TensorError: the checkpoint is refused.
        QuantizationError: its planes are.
    """
    converter, parameters = _converter(family)
    want, disk = dict(parameters), laid_out(parameters, **layout)
    for name in [each for each in disk if each.endswith(tuple(layout["names"]))]:
        packed, exponents = mx.quantize(disk.pop(name), mode="mxfp4")
        disk[f"{name}_blocks"] = packed.view(mx.uint8).reshape(*exponents.shape, 16)
        disk[f"{name}_scales"] = exponents
    stacks = [n for n in want if f".{layout['tree']}." in n and n.endswith(".weight")]
    for name in stacks:
        want[name], want[name.replace(".weight", ".scales")] = mx.quantize(want[name], mode="mxfp4")
    decoded = decode_encodings(
        disk, {"quantization_config": {"quant_method": "mxfp4"}}, dense=mx.float32
    ).weights
    got = converter.convert(decoded).tensors
    return [n for n, v in want.items() if n not in got or not mx.array_equal(got[n], v).item()]


def check_spellings(family: Family) -> None:
    """Every listed spelling is read as the parameters that it was made of.

    Raises:
        AssertionError: naming what is not.
        TensorError: a spelling is refused.
    """
    own = disk_names().get(family.family, {})
    layouts = {f"layout {i}": {"layout": each} for i, each in enumerate(own.get("layouts", ()))}
    for label, spelling in {**layouts, **own.get("spellings", {})}.items():
        wrong = misread(family, spelling)
        assert not wrong, f"{label}: {wrong[:4]}"
    for layout in own.get("blocks", ()):
        wrong = misread_blocks(family, layout)
        assert not wrong, f"blocks: {wrong[:4]}"
