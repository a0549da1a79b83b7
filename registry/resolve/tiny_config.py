"""A tiny config.json for a family, made from its file alone: small sizes, every kind of layer.

Sizes are small multiples of 32, so that every quantisation group fits. What cannot be guessed, a family
file states under `example`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from pydantic import StrictBool, StrictFloat, StrictInt

from mlx_experts.registry.catalog.catalog import mixers
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec import layer_rules as rules
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 4,
    "vocab_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "dense_width": 128,
    "norm_eps": 1e-5,
    "max_positions": 512,
    "num_experts": 8,
    "top_k": 2,
    "expert_width": 64,
}
# By the field's name in the family file, for references outside the section of sizes.
_FIELDS: dict[str, Any] = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "v_head_dim": 32,
    "window": 8,
    "chunk": 8,
    "width": 64,
    "count": 1,
    "keep": 1,
    "first": 1,
    "zero_experts": 0,
    "theta": 10000.0,
}
# By a part of the config key, for options whose type the schema does not know; the first that fits.
_KEYS: tuple[tuple[str, Any], ...] = (
    ("eps", 1e-6),
    ("rank", 32),
    ("rope_head_dim", 16),
    ("head_dim", 32),
    ("n_heads", 4),
    ("num_heads", 4),
    ("heads", 4),
    ("kernel", 4),
    ("L_cache", 3),
    ("group", 1),
    ("topk", 4),
    ("theta", 10000.0),
    ("size", 64),
    ("width", 64),
    ("dim", 32),
)
# Mappings whose keys are names of layer types or of config values, of which `from` may be one.
_BY_NAME = ("variants", "dense_types", "mlp_variants", "map")


def tiny_config(family: Family) -> dict[str, Any]:
    """A config that the family resolves, with at least one layer of every kind that it declares.

    Returns:
        A config.json as a mapping; entries of the family's `example` section win.

    Raises:
        SpecError: the `example` section gives something else than layers for their number.
    """
    flat: dict[str, Any] = {}
    # A copy: what is made of it may be changed.
    _put_all(flat, deepcopy(family.example))
    for name, value in _SIZES.items():
        ref = getattr(family.config, name)
        if isinstance(ref, Ref) and not _known(flat, ref):
            _put(flat, ref, value)
    stated = _first(flat, family.config.num_layers) or _SIZES["num_layers"]
    if not isinstance(stated, list | str | int):
        raise SpecError(
            "the example does not say how many layers there are",
            where=f"{family.family}.yaml, example",
            found=repr(stated)[:80],
        )
    _layer_rules(flat, family, stated if isinstance(stated, int) else len(stated))
    for _, field, ref, kind in _references(family):
        if not _known(flat, ref):
            value = _guess(field, ref, kind)
            if value is not None:
                _put(flat, ref, value)
    flat.setdefault("rope_theta", 10000.0)
    identity = {
        "model_type": family.model_types[0] if family.model_types else family.family,
        "architectures": list(family.architectures[:1]),
    }
    if family.text_config:
        config = {**identity, family.text_keys[0]: {**flat, **_nested_type(family)}}
    else:
        config = {**flat, **identity}
    _put_all(config, (family.when.equals if family.when else None) or {})
    return config


def _nested_type(family: Family) -> dict[str, Any]:
    texts = [t for t in family.model_types if t.endswith("_text")]
    return {"model_type": texts[0]} if texts else {}


def _put_all(config: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        _set(config, key, value)


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for depth, part in enumerate(parents, 1):
        config = config.setdefault(part, {})
        if not isinstance(config, dict):
            raise SpecError(
                f"the example config has no place for the key {key}",
                where="the family file's example",
                expected=f"{'.'.join(parents[:depth])} as a mapping, or {key} stated there",
                found=repr(config)[:80],
            )
    config[leaf] = value


def _get(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(config: dict[str, Any], ref: Ref, value: Any) -> None:
    _set(config, ref.keys[0], value)


def _known(config: dict[str, Any], ref: Ref) -> bool:
    # What stands for each layer in a list of its own is stated by an example, or not at all.
    return any(_get(config, key.split(".{layer}")[0]) is not None for key in ref.keys)


def _first(config: dict[str, Any], value: Any) -> Any:
    if not isinstance(value, Ref):
        return value
    return next((v for k in value.keys if (v := _get(config, k)) is not None), None)


def _layer_rules(config: dict[str, Any], family: Family, layers: int) -> None:
    """State per-layer lists where a rule needs one and nothing has stated another."""
    type_rules = family.layer_types or ()
    for rule in type_rules[:1]:
        if isinstance(rule, rules.TypeList) and _get(config, rule.key) is None:
            words = list(rule.map or (kind for kind in family.variants if kind)) or ["full_attention"]
            _set(config, rule.key, [words[i % len(words)] for i in range(layers)])
        elif isinstance(rule, rules.TypeLetters) and _get(config, rule.key) is None:
            letters = list(rule.map)
            _set(config, rule.key, "".join(letters[i % len(letters)] for i in range(layers)))
        elif isinstance(rule, rules.TypeIndices) and _get(config, rule.key) is None:
            _set(config, rule.key, [i + rule.base for i in range(0, layers, 2)])
    for moe_rule in family.moe.layers[:1]:
        if isinstance(moe_rule, rules.ListRule) and _get(config, moe_rule.key) is None:
            dense, sparse = ("dense", "sparse") if "types" in moe_rule.key else (0, 1)
            first = dense if family.dense is not None else sparse
            _set(config, moe_rule.key, [first] + [sparse] * (layers - 1))
        elif isinstance(moe_rule, rules.IndexRule) and _get(config, moe_rule.key) is None:
            _set(config, moe_rule.key, ",".join(str(i) for i in range(1, layers)))
        elif (
            isinstance(moe_rule, rules.RangeRule)
            and isinstance(moe_rule.start, Ref)
            and not _known(config, moe_rule.start)
            and family.dense is not None
        ):
            _put(config, moe_rule.start, 1)


def _references(family: Family) -> Iterator[tuple[str, str, Ref, str]]:
    """Every reference outside the sizes: where it stands, its field, itself, and the type it gives."""
    for name in Family.model_fields:
        if name not in ("config", "layer_types", "example", "when"):
            yield from _walk(name, name, getattr(family, name), "any")
    for kind, mixer in mixers(family).items():
        if mixer is not None:
            yield from _walk(f"variants.{kind}", "variants", mixer, "any")


def _walk(at: str, field: str, value: Any, kind: str) -> Iterator[tuple[str, str, Ref, str]]:
    if isinstance(value, Ref):
        yield at, field, value, kind
    elif isinstance(value, Spec):
        for name, type_of in _types(type(value)):
            yield from _walk(f"{at}.{name}", name, getattr(value, name), type_of)
    elif isinstance(value, dict) and (field in _BY_NAME or "from" not in value):
        for name, item in value.items():
            yield from _walk(f"{at}.{name}", name, item, "any")
    elif isinstance(value, dict):
        yield at, field, Ref.model_validate(value), "any"
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _walk(f"{at}[{i}]", field, item, kind)


@functools.cache
def _types(section: type[Spec]) -> tuple[tuple[str, str], ...]:
    """The fields of a section, each with the type that it gives."""
    return tuple((name, _type_of(info.annotation)) for name, info in section.model_fields.items())


def _type_of(annotation: Any) -> str:
    text = repr(annotation)
    for name, marker in (("bool", StrictBool), ("float", StrictFloat), ("int", StrictInt)):
        if repr(marker) in text:
            return name
    return "any"


def _guess(field: str, ref: Ref, kind: str) -> Any:
    """A value for a reference, or None to leave the stated default alone."""
    known = ref.map if ref.map is not None else ref.only
    if known is not None:
        return next(iter(known)) if ref.required else None
    if kind == "bool":
        return False if ref.required else None
    if field in _FIELDS and (kind != "any" or ref.required or isinstance(ref.default, int)):
        return _FIELDS[field]
    default = None if ref.required else ref.default
    if isinstance(default, bool) or (not ref.required and not isinstance(default, int | float)):
        return None
    for part, value in _KEYS:
        if part in ref.keys[0]:
            return value if ref.required or (isinstance(value, int) and default != 1) else None
    if not ref.required:
        return None
    return 1.0 if kind == "float" else 1


def config_keys(family: Family) -> set[str]:
    """Every top-level config key that the family reads, rules and rope parameters included."""
    keys = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "text_config"}
    keys |= {"original_max_position_embeddings", *(k.split(".")[0] for k in family.example)}
    for name in type(family.config).model_fields:
        value = getattr(family.config, name)
        if isinstance(value, Ref):
            keys.update(value.keys)
    keys.update(key for _, _, ref, _ in _references(family) for key in ref.keys)
    for rule in (*(family.layer_types or ()), *family.moe.layers):
        for field in ("key", "dense", "start", "end"):
            value = getattr(rule, field, None)
            if isinstance(value, str):
                keys.add(value)
        keys.update(k for _, _, ref, _ in _walk("", "", rule, "any") for k in ref.keys)
    return {key.split(".")[0] for key in keys}
