"""Generates docs/schema.md: every section of a family file, and the names that its values may be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any, Literal, get_args, get_origin

from caches_and_fallbacks import caches, fallbacks, modules
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tables import table

from mlx_experts.engine.kernels import activations
from mlx_experts.registry.catalog import shorthand
from mlx_experts.registry.checks.known_names import ACTIVATIONS, CONFIG_NAMES
from mlx_experts.registry.spec.describe import plain, reference
from mlx_experts.registry.spec.family import Family, RouterSpec
from mlx_experts.registry.spec.values import Ref, Spec
from mlx_experts.registry.spec.written import Written, has_references

_INTRODUCTION = """\
# The family file

A value is a literal, or a reference to the checkpoint's config.json where a key takes one:
`config.key else value` in one line, `{from: key, default: value}` in full. An unknown key is an error.
`registry schema` prints the same as JSON Schema for [editors](editors.md). A section that a family leaves out
has its defaults; `null` takes a section away where its key takes null. `$name` stands for a value that
`define` names, or for one of the [named values](#named-values) of every family; in a list it may stand for
several items. A section with `extends: $name` is that value with changes.

Parts: [sections](#family) · [named values](#named-values) · [activations](#activations) · [scores](#scores) ·
[selections](#selections) · [mixers](#mixers) · [routers](#routers) · [blocks](#blocks) ·
[embeddings](#embeddings) · [injections](#injections) · [layout operations](#layout-operations) ·
[caches](#caches) · [fallbacks](#fallbacks)
"""
_SCORES = {
    "softmax": "`exp(l - max) / sum(exp(l - max))` over all logits, or over the picked ones (`order`)",
    "sigmoid": "`1 / (1 + exp(-l))`, each logit by itself",
    "sqrtsoftplus": "`sqrt(log(1 + exp(l)))`, each logit by itself",
}
_KINDS = {
    "selection": "Selections",
    "mixer": "Mixers",
    "router": "Routers",
    "block": "Blocks",
    "embedding": "Embeddings",
    "injection": "Injections",
    "layout operation": "Layout operations",
}
"""The kinds of pieces that a family file names, and what their part of the page is called."""
_OWN = {
    "selection": ("topk", "The experts with the best scores.", "moe.router"),
    "mixer": ("gqa", "Grouped-query attention, whose keys are those of [Gqa](#gqa).", "attention"),
    "router": ("standard", "Logits, score, selection and weights, as [Router](#router) says.", "moe.router"),
    "block": ("standard", "Two branches with norms, as [Block](#block) says.", "block"),
    "embedding": ("standard", "Rows of one table.", "embedding"),
}
"""What the engine has of a kind without a plugin: its name, what it is, and where it is named."""


def schema_page() -> str:
    """One table for each section, and one for each kind of names."""
    seen: dict[type[Spec], None] = {}
    for section in (Family, Ref):
        _reach(section, seen)
    parts = [_INTRODUCTION, *(_section(section, title(section), 2) for section in seen)]
    parts += [_named_values(), _activations(), _scores()]
    for kind, heading in _KINDS.items():
        parts.append(_pieces(kind, heading, seen))
    parts += [caches(), fallbacks()]
    return "\n".join(parts)


def title(section: type[Spec]) -> str:
    """What a section is called on the page."""
    name = section.__name__.removesuffix("Spec")
    return re.sub(r"(?<=[a-z0-9])Options$", " options", name)


def _link(section: type[Spec]) -> str:
    return f"[{title(section)}](#{title(section).lower().replace(' ', '-')})"


def _reach(section: type[Spec], seen: dict[type[Spec], None]) -> None:
    """Every section in a section, each after the one that it is first met in."""
    section = section.section if issubclass(section, Written) else section
    if section in seen:
        return
    seen[section] = None
    for inner in _inside(section):
        _reach(inner, seen)


def _form(section: type[Spec]) -> Any:
    return Written[section] if has_references(section) else section  # type: ignore[valid-type]


def _inside(section: type[Spec]) -> Iterator[type[Spec]]:
    def sections(kind: Any) -> Iterator[type[Spec]]:
        if isinstance(kind, type) and issubclass(kind, Spec):
            yield kind
        elif get_origin(kind) is not Literal:
            for each in get_args(kind):
                yield from sections(each)

    for info in _form(section).model_fields.values():
        yield from sections(info.rebuild_annotation())


def _section(section: type[Spec], heading: str, depth: int) -> str:
    form = _form(section)
    rows = [
        (f"`{info.alias or name}`", _takes(info.annotation), _default(info), info.description or "")
        for name, info in form.model_fields.items()
    ]
    doc = inspect.cleandoc(section.__doc__ or "")
    said = not section.alone or "may stand alone" in doc
    short = "" if said else f" `{section.alone}` may stand alone."
    head = f"{'#' * depth} {heading}\n\n{doc}{short}\n\n"
    return head + (table(("key", "takes", "default", "meaning"), rows) if rows else "It has no keys.\n")


def _takes(annotation: Any) -> str:
    return ", ".join(dict.fromkeys(_type_names(annotation)))


_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "yes or no",
    dict: "mapping",
    type(None): "null",
}


def _type_names(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, str):
        yield f"`{annotation}`"
        return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        section = annotation.section if issubclass(annotation, Written) else annotation
        yield "reference" if section is Ref else _link(section)
        return
    arguments = [each for each in get_args(annotation) if each is not ...]
    origin = get_origin(annotation)
    if annotation in _WORDS:
        yield _WORDS[annotation]
    elif origin in (tuple, list):
        yield "list of " + ", ".join(dict.fromkeys(n for a in arguments for n in _type_names(a)))
    elif origin is dict:
        yield "mapping"
    elif arguments:
        # Marks of a type are no types.
        kinds = arguments[:1] if hasattr(annotation, "__metadata__") else arguments
        for argument in kinds:
            yield from _type_names(argument)
    elif annotation is Any:
        yield "anything"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.get_default()
    if isinstance(value, Ref):
        return reference(value)
    if isinstance(value, Spec):
        return "its defaults"
    if isinstance(value, tuple) and any(isinstance(each, Spec) for each in value):
        return ", ".join(f"`{getattr(each, 'kind', title(type(each)))}`" for each in value)
    return (plain(value) or "nothing") if value not in ((), {}) else "empty"


def _named_values() -> str:
    text = inspect.cleandoc(resources.files(shorthand.__package__).joinpath(shorthand.STANDARD).read_text())
    return f"## Named values\n\n```yaml\n{text}\n```\n"


def _activations() -> str:
    rows = []
    for name in ACTIVATIONS:
        held = activations.lookup(name)
        called = [config for config, ours in CONFIG_NAMES.items() if ours == name]
        formula = re.sub(r"\bme_|(?<=[\d.])f\b", "", held.c or "")
        shown = f"`{formula}`" if formula else "in plain MLX only"
        rows.append(
            (f"`{name}`", "gate, up" if held.gated else "up", shown, ", ".join(f"`{c}`" for c in called))
        )
    return (
        "## Activations\n\nWhat `activation` may name, with the gate `g`, the up projection `u`, and the "
        "constants `alpha` and `limit`. In a GLU a function of one argument is the one on its gate: there "
        "`silu` is `swiglu`, and `gelu` is `geglu`. All are computed in float32.\n\n"
        + table(("name", "reads", "value", "configs also call it"), rows)
    )


def _scores() -> str:
    rows = [(f"`{name}`", _SCORES[name]) for name in get_args(RouterSpec.model_fields["score"].annotation)]
    return "## Scores\n\nWhat `moe.router.score` may name, of a logit `l`.\n\n" + table(
        ("name", "score"), rows
    )


def options(module: Any) -> list[type[Spec]]:
    """The sections that a piece's module declares: its options, and what stands in them."""
    return [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, Spec) and value.__module__ == module.__name__
    ]


def _pieces(kind: str, heading: str, seen: dict[type[Spec], None]) -> str:
    rows, more = [], []
    if kind in _OWN:
        name, what, where = _OWN[kind]
        rows.append((f"`{name}`", what, f"keys of `{where}`"))
    for name, module in sorted(modules(kind)):
        met = dict(seen)
        for section in options(module):
            _reach(section, met)
        own = [section for section in met if section not in seen]
        seen.update(dict.fromkeys(own))
        more += [_section(section, title(section), 3) for section in own]
        what = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        rows.append((f"`{name}`", what, ", ".join(map(_link, options(module)))))
    return f"## {heading}\n\n" + "\n".join([table(("name", "what it is", "options"), rows), *more])
