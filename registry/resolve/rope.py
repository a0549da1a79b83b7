"""Works out the rotary parameters of a layer from the several places where configs state them."""

from __future__ import annotations

import functools
from typing import Any

from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.plan import Sizes
from mlx_experts.registry.resolve.resolver import Resolver
from mlx_experts.registry.spec.family import RopeSpec
from mlx_experts.registry.spec.rope_plan import FLOAT32_LARGEST, FLOAT32_LEAST, RopePlan
from mlx_experts.registry.spec.written import Written


def rope_plan(
    resolver: Resolver,
    spec: Written[RopeSpec],
    layer: int,
    layer_type: str,
    sizes: Sizes,
    at: str = "attention.rope",
) -> RopePlan | None:
    """Rotary parameters from `rope_parameters` (flat or by layer type) or the older flat keys.

    Args:
        layer_type: picks the entry where `rope_parameters` is keyed by layer type.
        at: key of the family file under which the section stands.

    Returns:
        The parameters, or None for a layer that does not rotate.

    Raises:
        ConfigError: the config holds a value that cannot be.
        SpecError: the family file does.
    """

    read = functools.partial(_read, resolver, spec, layer, layer_type, sizes, at)
    return resolver.alike(spec, (layer_type, sizes.max_positions, at), read)


def _read(
    resolver: Resolver, spec: Written[RopeSpec], layer: int, layer_type: str, sizes: Sizes, at: str
) -> RopePlan | None:
    def field(name: str) -> Any:
        return resolver.field(spec, name, layer, at)

    own_theta = field("layer_theta")
    if not field("enabled") or own_theta == 0:
        return None
    stated = [
        _rope_object(resolver, name, spec.entry or layer_type) for name in ("rope_scaling", "rope_parameters")
    ]
    params: dict[str, Any] = {**stated[0], **stated[1]} or dict(field("when_absent"))
    scaled = field("scaled_types")
    if not isinstance(scaled, list | None):
        raise resolver.fault(
            spec.scaled_types,
            layer,
            f"{at}.scaled_types",
            "is no list of layer types",
            expected="a list of layer types",
            found=repr(scaled)[:80],
        )
    kind = params.get("rope_type") or params.get("type") or "default"
    if scaled is not None and layer_type not in scaled:
        kind = "default"
    theta, theta_from = own_theta, "layer_theta"
    if theta is None:
        theta, theta_from = _one(resolver, params.get("rope_theta"), layer), ""
    if theta is None:
        theta, theta_from = field("theta"), "theta"
    share, share_from = _one(resolver, params.get("partial_rotary_factor"), layer), ""
    dims = field("dims") if share is None else None
    original = resolver.view.get("original_max_position_embeddings")
    if original is not None:
        params.setdefault("original_max_position_embeddings", original)
    params = {**{k: v for k, v in field("options").items() if v is not None}, **params}
    if share is None:
        share, share_from = field("partial"), "partial"

    def positive(key: str, value: Any, most: float, source: str) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and FLOAT32_LEAST <= value <= most:
            return float(value)
        what, found = "must be a positive number", repr(value)[:80]
        expected = f"a number from {FLOAT32_LEAST:g} to {most:g}"
        if source:
            raise resolver.fault(
                getattr(spec, source), layer, f"{at}.{source}", what, expected=expected, found=found
            )
        raise ConfigError(f"'{key}' {what}", where="config.json", expected=expected, found=found)

    return RopePlan(
        style=field("style"),
        theta=positive("rope_theta", theta, FLOAT32_LARGEST, theta_from),
        type=str(kind),
        partial=positive("partial_rotary_factor", share, 1, share_from),
        dims=dims,
        params=params,
        max_positions=sizes.max_positions,
    )


def _rope_object(resolver: Resolver, name: str, layer_type: str) -> dict[str, Any]:
    """An object of rope parameters, or its entry for a layer type where it has one for each; else {}."""
    value = resolver.view.mapping(name)
    if not any(isinstance(each, dict) for each in value.values()):
        return value
    entry = value.get(layer_type)
    return entry if isinstance(entry, dict) else {}


def _one(resolver: Resolver, value: Any, layer: int) -> Any:
    entry = resolver.at_layer(value, layer) if isinstance(value, list) else None
    return value if entry is None else entry
