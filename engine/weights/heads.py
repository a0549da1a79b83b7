"""What becomes of the output head: tied, borrowed from the embedding, or of unit columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_experts.engine.weights.tensor_tree import Tensors, Tree, module_tensors, put, take
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.resolve.planner import Plan
from mlx_experts.registry.spec.values import Ref

# Rounding to bfloat16 moves the length of a column of length one by less than this.
_UNIT_TOLERANCE = 0.01
COPY = "head equal to the tied embedding"


@dataclass(frozen=True)
class HeadNames:
    """Module paths of the output head and of the token embedding."""

    head: str
    embedding: str

    @classmethod
    def of(cls, plan: Plan) -> HeadNames:
        """The paths in the module tree of a plan's model."""
        names = plan.family.names
        wrapper = f"{names.wrapper}." if names.wrapper else ""
        return cls(f"{wrapper}{plan.head.path}", f"{wrapper}{names.root}.{names.embed}")


def settle_tied(plan: Plan, names: HeadNames, tree: Tree, tensors: Tensors, values: bool) -> int | None:
    """Remove a tied model's copies of the embedding; how many, or None where there is another head instead.

    As transformers 5.24 does (``PreTrainedModel.tie_weights``): a head that differs from the embedding is the
    model's own whatever the config says, and where only the head is there it serves as the embedding.

    Args:
        values: whether the tensors hold values; without, equal shapes count as equal values.
    """
    if not plan.head.tied:
        return 0
    embed = f"{names.embedding}."
    # A plugin's embedding holds the tokens' matrix somewhere inside.
    whole = (plan.sizes.vocab_size, plan.sizes.hidden_size)
    inside = [n for n, shape in tree.shapes.items() if n.startswith(embed) and shape == whole]
    embed = inside[0].removesuffix("weight") if inside else embed
    # A tied head may have a bias of its own in the tree.
    found = module_tensors(tensors, names.head)
    head = {suffix: v for suffix, v in found.items() if f"{names.head}.{suffix}" not in tree.shapes}
    twin = {suffix: tensors.get(embed + suffix) for suffix in head}
    if not head:
        return 0
    if all(value is None for value in twin.values()) and embed + "weight" not in tensors:
        for suffix in head:
            tensors[embed + suffix] = tensors.pop(f"{names.head}.{suffix}")
        return 0
    if not all(_same(value, twin[suffix], values) for suffix, value in head.items()):
        return None
    for suffix in head:
        del tensors[f"{names.head}.{suffix}"]
    return len(head)


def borrow(plan: Plan, names: HeadNames, tensors: Tensors) -> None:
    """Give a head of its own, where the checkpoint has none, what the embedding has."""
    if plan.head.embedding_if_absent and not module_tensors(tensors, names.head):
        put(tensors, names.head, module_tensors(tensors, names.embedding))


def leave_out_copy(plan: Plan, names: HeadNames, tensors: Tensors) -> None:
    """Remove a head that :func:`borrow` would give back."""
    head, embedding = (module_tensors(tensors, path) for path in (names.head, names.embedding))
    equal = head.keys() == embedding.keys() and all(_same(head[s], embedding[s], True) for s in head)
    if plan.head.embedding_if_absent and equal:
        take(tensors, names.head)


def unit_columns(plan: Plan, names: HeadNames, tensors: Tensors) -> None:
    """Columns of length one for a head that is declared so; one that has them already stays as it is."""
    name = f"{names.head}.weight"
    head = tensors.get(name)
    if not plan.head.normalize_columns or head is None or not mx.issubdtype(head.dtype, mx.floating):
        return
    value = head.astype(mx.float32)
    lengths = mx.linalg.norm(value, axis=0, keepdims=True)
    if mx.any(mx.abs(lengths - 1) > _UNIT_TOLERANCE).item():
        tensors[name] = (value / (lengths + 1e-7)).astype(head.dtype)


def _same(a: mx.array, b: mx.array | None, values: bool) -> bool:
    if b is None or a.shape != b.shape:
        return False
    return not values or bool(mx.array_equal(a, b).item())


def missing_head(plan: Plan, missing: list[str]) -> str:
    """What to do where a head of its own is missing: which key decides, and what to set; else nothing."""
    names = HeadNames.of(plan)
    if f"{names.head}.weight" not in missing:
        return ""
    decides = plan.family.head.tied
    if not isinstance(decides, Ref):
        whose = f"the family '{plan.family.family}' never ties the head to the embedding"
        return f"{whose}; get the file that holds {names.head}.weight"
    said: list[str] = []
    for key in decides.keys:
        nested, *whole = plan.config.levels
        levels = [(f"{plan.config.nested}.{key}", nested), (key, whole[0])] if whole else [(key, nested)]
        said += [f"`{path}` says {_said(ConfigView(level, ()).get(key))}" for path, level in levels]
    place = "at the top level of config.json" if decides.outer else "in config.json"
    return (
        f"the config does not tie the head to the embedding ({', '.join(said)}); set `{decides.keys[0]}` to "
        f"true {place} if the embedding is the head, else get the file that holds the head"
    )


def say_untied(plan: Plan, config: dict[str, Any]) -> None:
    """Make a config say that the head is not the embedding, at every place that the family reads."""
    decides = plan.family.head.tied
    keys: tuple[str, ...] = decides.keys if isinstance(decides, Ref) else ()
    levels = [config]
    if plan.config.nested:
        *parents, last = plan.config.nested.split(".")
        outer = config
        for parent in parents:
            outer[parent] = outer = dict(outer[parent])
        outer[last] = dict(outer[last])
        levels.append(outer[last])
    for level in levels:
        for key in keys:
            *parents, last = key.split(".")
            at: Any = level
            for parent in parents:
                at = at.get(parent) if isinstance(at, dict) else None
            if isinstance(at, dict):
                at[last] = False


def _said(value: object) -> str:
    return "nothing" if value is None else str(value).lower()
