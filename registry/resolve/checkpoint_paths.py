"""Writes out the paths of a checkpoint section: those in a layer, and those of the standard layouts."""

from __future__ import annotations

from typing import Any

from mlx_experts.registry.resolve.resolver import Resolver
from mlx_experts.registry.spec.checkpoint import CheckpointSpec
from mlx_experts.registry.spec.family import Family


def resolve_checkpoint(family: Family, resolver: Resolver) -> CheckpointSpec:
    """The checkpoint section with literals only, every path whole and every expert layout stated."""
    section = resolver.spec(family.checkpoint, 0, "checkpoint")
    names = family.names
    layer = ".".join(part for part in (names.wrapper, names.root, names.layers, "{layer}") if part)

    def whole(value: Any) -> Any:
        if isinstance(value, str):
            return layer + value if value.startswith(".") else value
        if isinstance(value, tuple | list):
            return type(value)(whole(each) for each in value)
        if isinstance(value, dict):
            return {key: whole(each) for key, each in value.items()}
        return value

    operations = []
    for operation in section.conversions:
        paths = {k: whole(v) for k, v in operation if k in ("source", "target", "options")}
        operations.append(operation.model_copy(update=paths))
    return section.model_copy(update={"conversions": tuple(operations), "experts": family.expert_layouts})
