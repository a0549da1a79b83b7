"""Picks one family of each kind for tests that look at one part of a model.

Two families whose tiny models have the same router, say, are one case to a test of routers. EVERY_FAMILY=1 in
the environment takes all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.resolve.plan import LayerPlan, Plan
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

Part = Callable[[Plan], Any]


def one_of_each(part: Part, names: Iterable[str]) -> list[str]:
    """Of ``names``, the first of those whose tiny models have an equal part.

    Args:
        part: what a test looks at.
    """
    if os.environ.get("EVERY_FAMILY"):
        return list(names)
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(json.dumps(part(tiny_plan(name)), sort_keys=True, default=str), name)
    return list(found.values())


@cache
def tiny_plan(name: str) -> Plan:
    """The plan of a family's tiny model, made once."""
    family = catalog().load(name)
    return resolve(family, tiny_config(family))


def routers(plan: Plan) -> Any:
    """How tokens pick experts."""
    return _each(plan, lambda layer: (_said(layer.moe.router), *_counts(layer)) if layer.moe else None)


def blocks(plan: Plan) -> Any:
    """What a block with experts computes."""
    return _each(plan, lambda layer: (_said(layer.moe), *_counts(layer)) if layer.moe else None)


def mixers(plan: Plan) -> Any:
    """What mixes tokens, and the layers around it."""
    return plan.norm.offset, _each(plan, lambda layer: (_said(layer.mixer), _said(layer.block)))


def layouts(plan: Plan) -> Any:
    """What checkpoints make of the experts."""
    experts = _each(plan, lambda layer: (layer.moe.path, _said(layer.moe.experts)) if layer.moe else None)
    return [each.model_dump() for each in plan.checkpoint.experts or ()], experts


def _each(plan: Plan, part: Callable[[LayerPlan], Any]) -> list[str]:
    """A part of every layer, each different one once."""
    return sorted({json.dumps(part(layer), sort_keys=True, default=str) for layer in plan.layers})


def _counts(layer: LayerPlan) -> tuple[int, int]:
    return layer.sizes.num_experts, layer.sizes.top_k


def _said(value: Any) -> Any:
    """A section's values without its module paths."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _said(dataclasses.asdict(value))
    if hasattr(value, "model_dump"):
        return _said(value.model_dump())
    if isinstance(value, dict):
        return {key: _said(each) for key, each in value.items() if key not in ("path", "names")}
    return value
