"""One family in words: what sets it apart from another, and the keys in which both differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.layer_rules import TypeRange
from mlx_experts.registry.spec.values import Ref, Spec, is_reference

# Who a family is, is no difference; and nothing but the file itself reads `define`.
_IDENTITY = frozenset(
    (
        *("family", "extends", "reference", "model_types", "architectures", "when"),
        *("define", "example", "notes"),
    )
)
_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
_KINDS = {"gqa": "grouped-query attention", "mla": "latent attention"}
_SHARED = {
    "mean": "averaged with the routed ones",
    "sigmoid_gate": "behind a sigmoid gate",
    "softmax_mix": "mixed in by a softmax",
    "router": "weighted by the router",
}
_LAYERS = {"all": "every layer sparse", "list": "sparse layers listed", "indices": "sparse layers listed"}


def _at(family: Family, path: str) -> Any:
    """What stands at a dotted path, a reference as its default where it has one; None where nothing does."""
    value: Any = family
    for name in path.split("."):
        if not isinstance(value, Spec) or name not in type(value).model_fields:
            return None
        value = getattr(value, name)
    return value


def _said(value: Any) -> Any:
    """A value, or of a reference its default, or the key that says it."""
    if not isinstance(value, Ref):
        return value
    return f"as '{value}' says" if value.required or isinstance(value.default, Ref) else value.default


def _attention(family: Family) -> str:
    kind = _at(family, "attention.kind")
    return "attention by layer type" if kind is None else _KINDS.get(kind, str(kind).replace("_", " "))


def _biases(family: Family) -> str:
    where = [
        name
        for name, key in (("query, key and value", "qkv_bias"), ("output", "out_bias"))
        if _said(_at(family, f"attention.{key}")) not in (None, False)
    ]
    return f"biases on {' and '.join(where)}" if where else "no biases in attention"


def _norms(family: Family) -> str:
    norm = _at(family, "attention.qk_norm")
    if norm is None or _said(norm.enabled) is False:
        return "no norms of queries and keys"
    return "norms of queries and keys" + (
        " over each head" if norm.over == "head" else " over the full width"
    )


def _rotation(family: Family) -> str:
    rope = _at(family, "attention.rope")
    if rope is None or _said(rope.enabled) is False:
        return "nothing rotates"
    part = _said(rope.partial)
    share = (
        "" if part in (None, 1, 1.0) else f", {part} of each head" if isinstance(part, float) else ", in part"
    )
    return f"{_said(rope.style)} rotation{share}"


def _sinks(family: Family) -> str:
    return "no attention sinks" if _at(family, "attention.sinks") is None else "attention sinks"


def _window(family: Family) -> str:
    # A type that a rule's switch gives only where a config asks for it sets nothing apart.
    rules = family.layer_types or ()
    rare = {r.is_ for r in rules if isinstance(r, TypeRange) and _said(r.enabled) is False}
    stated = [
        each.get("window")
        for name, each in (family.variants or {}).items()
        if isinstance(each, dict) and name not in rare
    ]
    windows = [_said(each) for each in (_at(family, "attention.window"), *stated)]
    return "no windows" if all(each in (None, 0) for each in windows) else "sliding windows"


def _score(family: Family) -> str:
    return f"{_said(_at(family, 'moe.router.score'))} scores"


def _selection(family: Family) -> str:
    select = _at(family, "moe.router.select")
    return "top-k selection" if select in (None, "topk") else f"{select} selection"


def _bias(family: Family) -> str:
    bias = _at(family, "moe.router.selection_bias")
    return "no selection bias" if bias is None or _said(bias.enabled) is False else "selection bias"


def _groups(family: Family) -> str:
    groups = _at(family, "moe.router.groups")
    if groups is None or _said(groups.enabled) is False or _said(groups.count) == 1:
        return "no groups of experts"
    return f"{_said(groups.count)} groups keep {_said(groups.keep)}"


def _normalise(family: Family) -> str:
    enabled = _said(_at(family, "moe.router.normalise.enabled"))
    return f"{'picked' if enabled not in (None, False) else 'raw'} scores as weights"


def _scale(family: Family) -> str:
    return f"weights times {_said(_at(family, 'moe.router.scale'))}"


def _shared(family: Family) -> str:
    shared = _at(family, "moe.shared")
    count = None if shared is None else _said(shared.count)
    if not count:
        return "no shared expert"
    plural = "" if count == 1 else "s"
    manner = _SHARED.get(str(shared.combine), "")
    return f"{_COUNTS.get(count, count)} shared expert{plural} {manner}".strip()


def _layers(family: Family) -> str:
    rules = _at(family, "moe.layers") or ()
    rule = rules[0] if rules else None
    if rule is None:
        return "no sparse layers"
    if rule.kind != "from_layer":
        return _LAYERS.get(rule.kind, f"sparse layers by {rule.kind.replace('_', ' ')}")
    first = _said(rule.first)
    return {0: "every layer sparse", 1: "first layer dense"}.get(first, f"first {first} layers dense")


def _activation(family: Family) -> str:
    return f"{_said(_at(family, 'moe.experts.activation.name'))} experts"


_ASPECTS: tuple[Callable[[Family], str], ...] = (
    *(_attention, _biases, _norms, _rotation, _window, _sinks),
    *(_score, _selection, _bias, _groups, _normalise, _scale, _shared, _layers, _activation),
)


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
    default = "" if ref.required else f", {_told(ref.default)} when absent"
    mapped = f", mapped {ref.map}" if ref.map else ""
    return f"config '{ref}'{default}{mapped}"


def _told(value: Any) -> str:
    """A value in words: of a section what is not its default, under the keys of a family file."""
    if isinstance(value, Ref):
        return reference(value)
    if is_reference(value):
        return reference(Ref.model_validate(value))
    if isinstance(value, Spec):
        return _listed((key, each) for key, each, usual in _entries(value) if each != usual) or "its defaults"
    if isinstance(value, dict):
        return _listed(value.items()) or "none"
    if isinstance(value, tuple | list):
        parts = isinstance(value[0], Spec | dict) if value else False
        return (" and ".join(f"({_told(each)})" for each in value) if parts else plain(value)) or "none"
    return plain(value) or "nothing"


def _listed(entries: Iterable[tuple[str, Any]]) -> str:
    return "; ".join(f"{key} {_told(each)}" for key, each in entries)


def _entries(section: Spec) -> Iterator[tuple[str, Any, Any]]:
    """The keys of a section as a family file writes them, each with its value and its default."""
    for name, info in type(section).model_fields.items():
        yield info.alias or name, getattr(section, name), info.get_default()


def _rows(at: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    if a == b:
        return
    inner: dict[str, tuple[Any, Any]] | None = None
    if isinstance(a, Spec) and type(a) is type(b) and not isinstance(a, Ref):
        inner = {
            f"{at}.{key}": (x, y) for (key, x, _), (_, y, _) in zip(_entries(a), _entries(b), strict=True)
        }
    elif isinstance(a, dict) and isinstance(b, dict) and not (is_reference(a) or is_reference(b)):
        inner = {f"{at}.{key}": (a.get(key), b.get(key)) for key in {**a, **b}}
    elif isinstance(a, tuple | list | None) and isinstance(b, tuple | list | None):
        items = [*(a or ()), *(b or ())]
        if any(isinstance(each, Spec | dict) for each in items):
            inner = {f"{at}[{i}]": pair for i, pair in enumerate(zip_longest(a or (), b or ()))}
    if inner is not None:
        yield from (row for key, (x, y) in inner.items() for row in _rows(key, x, y))
    elif (left := _told(a)) != (right := _told(b)):
        yield at, left, right


def difference(a: Family, b: Family) -> list[tuple[str, str, str]]:
    """Keys in which two families differ: (key, value of the first, value of the second).

    A section that only one of them has is one row, and so is a rule or an operation of another kind.
    """
    return [
        row
        for name, info in Family.model_fields.items()
        if name not in _IDENTITY
        for row in _rows(info.alias or name, getattr(a, name), getattr(b, name))
    ]


def differing(a: Family, b: Family) -> list[str]:
    """What is said of ``b`` and not of ``a``; defaults stand for what a config may say otherwise."""
    return [aspect(b) for aspect in _ASPECTS if aspect(a) != aspect(b)]


def sentence(a: Family, b: Family) -> str:
    """`b` said by its difference from `a`, for people: what sets it apart in words, then key by key."""
    rows = difference(a, b)
    if not rows:
        return f"{b.family} is the same as {a.family}"
    apart = ", ".join(differing(a, b)) or "what the keys below say"
    told = [f"{key}: {right} (there {left})" for key, left, right in rows]
    return f"{b.family} is the same as {a.family} except: {apart}\n\nkey by key\n  " + "\n  ".join(told)
