"""No constant of another family's: what nothing states of a checkpoint is set to what most models have.

A base is taken for its structure. Its numbers and switches, where neither a config key nor a tensor of this
checkpoint states them, are its own; each is set aside and asked about.
"""

from __future__ import annotations

from typing import Any

from mlx_experts.engine.tools.drafts.evidence import Evidence, get, is_gqa, plain, put, take_out
from mlx_experts.engine.tools.drafts.facts import Facts
from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec

# Numbers and switches that most families do without; each goes back to what the language gives it.
USUAL = (
    "embedding.multiplier",
    "block.residual_multiplier",
    "attention.scale",
    "attention.scale_width",
    "attention.clip",
    "attention.value_scale",
    "attention.temperature",
    "attention.chunk",
    "attention.window",
    "attention.window_extra",
    "dense.activation",
    "moe.experts.activation",
    "moe.shared.activation",
    "attention.value_norm",
    "attention.rope.layer_theta",
    "attention.rope.partial",
    "attention.rope.dims",
    "attention.rope.enabled",
    "attention.rope.when_absent",
    "attention.rope.options",
    "moe.router.softcap",
    "moe.router.multiplier",
    "moe.router.temperature",
    "moe.router.scale",
    "moe.router.groups",
    "moe.experts.apply_router_weight_on_input",
    "moe.experts.output_scale",
    "moe.experts.zero_experts",
    "head.multiplier",
    "head.divisor",
    "head.softcap",
    "norm.offset",
    "norm.uncentred",
)
CENTRED = 0.5
"""Weights of norms lie around one, or around zero where one is added to them."""
_ROPE_OBJECTS = ("rope_parameters", "rope_scaling")


def node_at(family: Family, path: str) -> Any:
    """What stands at a dotted path of a family; None where a section on the way is absent."""
    value: Any = family
    for part in path.split("."):
        if not isinstance(value, Spec) or part not in type(value).model_fields:
            return None
        value = getattr(value, part)
    return value


def stated(value: Any, view: ConfigView) -> str | None:
    """The config key that states a value, or one of a section's values; None where nothing does."""
    if isinstance(value, Ref):
        return next((key for key in value.keys if view.get(key, value.outer) is not None), None)
    if isinstance(value, Spec):
        inner = [getattr(value, name) for name in value.model_fields_set]
        return next((key for each in inner if (key := stated(each, view)) is not None), None)
    if isinstance(value, dict) and "from" in value:
        return stated(Ref.model_validate(value), view)
    if isinstance(value, dict):
        return next((key for each in value.values() if (key := stated(each, view)) is not None), None)
    return None


def set_aside(
    raw: dict[str, Any], family: Family, facts: Facts, view: ConfigView, evidence: Evidence, kin: bool
) -> None:
    """Take out of a family's mapping what nothing of a checkpoint states.

    Args:
        raw: the mapping, changed in place.
        kin: the base and the checkpoint are named alike, so that how norms are stored is taken from it.
    """
    gqa = is_gqa(family.attention)
    if not facts.extra_layers:
        take_out(raw, "mtp")
    named_alike, kin = kin, kin and facts.norm_mean is None
    for path in USUAL:
        if path.startswith("attention.") and not (gqa or path.startswith("attention.rope.")):
            continue
        value = node_at(family, path)
        if value is None or stated(value, view) is not None or (kin and path.startswith("norm.")):
            continue
        if path == "attention.rope.when_absent" and first_object(view):
            continue
        take_out(raw, path)
    if facts.norm_mean is not None and facts.norm_mean < CENTRED:
        offset = plain(family.norm.offset)
        put(raw, "norm", {**(raw.get("norm") or {}), "offset": "run" if offset == "none" else offset})
        if family.norm.uncentred:
            put(raw, "norm.uncentred", plain(family.norm.uncentred))
    _router(raw, family, facts, view, named_alike)
    if facts.experts is not None and facts.experts.certain is not None:
        _norm(raw, family, facts, view, kin)
    _types(raw, family, view)
    if family.attention is not None and not gqa:
        for name, option in dict(get(raw, "attention.options") or {}).items():
            if isinstance(option, dict) and "from" not in option and stated(option, view) is None:
                take_out(raw, f"attention.options.{name}")


def first_object(view: ConfigView) -> bool:
    """Whether a config has rotary parameters of its own."""
    return any(isinstance(view.get(key), dict) for key in _ROPE_OBJECTS)


def _router(raw: dict[str, Any], family: Family, facts: Facts, view: ConfigView, kin: bool) -> None:
    """Score and renormalizing, where no key states them: what most routers of this kind do."""
    router = family.moe.router
    if router.kind != "standard" or facts.experts is None:
        return
    if stated(router.score, view) is None:
        put(raw, "moe.router.score", "sigmoid" if facts.selection_bias else "softmax")
    if stated(router.renormalize, view) is None and router.order == "score_then_topk" and not kin:
        put(raw, "moe.router.renormalize", {"enabled": True})
    if router.select != "topk" and stated(router.options, view) is None:
        take_out(raw, "moe.router.select")
        take_out(raw, "moe.router.options")


def _norm(raw: dict[str, Any], family: Family, facts: Facts, view: ConfigView, kin: bool) -> None:
    if facts.norm_bias or stated(family.norm.kind, view) is not None or kin:
        return
    key = stated(family.config.norm_eps, view) or ""
    put(raw, "norm.kind", "layer_no_bias" if "layer" in key and "rms" not in key else "rms")
    if get(raw, "norm.kind") == "rms":
        take_out(raw, "norm.kind")


def _types(raw: dict[str, Any], family: Family, view: ConfigView) -> None:
    """Layer types whose rules read nothing that the config has."""
    attention = family.attention
    if family.layer_types is None or attention is None or not is_gqa(attention):
        return
    keys = {key for rule in family.layer_types for key in rule_keys(plain(rule))}
    windows = {key for change in family.variants.values() for key in reads(change)}
    if any(view.get(key) is not None for key in keys):
        return
    own = [k for k in windows if view.get(k) is not None]
    if not own and attention.rope is not None:
        for path in ("layer_types", "variants", "dense_types", "mlp_variants"):
            take_out(raw, path)


def rule_keys(raw: dict[str, Any]) -> set[str]:
    """Config keys that a rule for layers reads."""
    found = reads(raw)
    return found | {str(raw[name]) for name in ("key", "dense") if isinstance(raw.get(name), str)}


def reads(raw: Any) -> set[str]:
    """Config keys that a part of a family's mapping reads."""
    if isinstance(raw, dict):
        given = raw.get("from", [])
        own = {given} if isinstance(given, str) else set(given)
        return own.union(*(reads(each) for each in raw.values()))
    return set().union(*(reads(each) for each in raw)) if isinstance(raw, list) else set()
