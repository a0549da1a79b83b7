"""What sets families apart, in the words that people use for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.layer_rules import TypeRange
from mlx_experts.registry.spec.values import Ref, Spec

_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
_KINDS = {"gqa": "grouped-query attention", "mla": "latent attention"}
_SHARED = {"sigmoid_gated": "behind a sigmoid gate", "parallel": "beside the experts' norm"}
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


def differing(a: Family, b: Family) -> list[str]:
    """What is said of ``b`` and not of ``a``; defaults stand for what a config may say otherwise."""
    return [aspect(b) for aspect in _ASPECTS if aspect(a) != aspect(b)]
