"""The config keys and defaults that a family's neighbours know, which its file must not contradict.

`tests/data/stated.yaml` adds what the authors' own code or files say and no installed package has,
`tests/data/read_originals.yaml` what reading the originals that nothing here can run says.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import class_plans
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.catalog.catalog import Catalog, mixers
from mlx_experts.registry.catalog.public_models import models
from mlx_experts.registry.catalog.yaml_reader import read_yaml
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.references import references

_TESTS = Path(__file__).parent.parent
_MAPPINGS = frozenset(
    f"MODEL_FOR_{kind}_MAPPING_NAMES" for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
)
_WORDS = re.compile(r"^[A-Za-z_]\w*$")
# Settings that say nothing of what a model computes.
_NEVER = frozenset({"model_type", "max_position_embeddings"})
# A width that every config with a dense layer states, whatever default a class has.
_WIDTHS = frozenset({"intermediate_size"})
# Keys that any config may have, whatever its class: rotations, ties and the older spelling of both.
COMMON = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "tie_word_embeddings",
    "head_dim",
    "hidden_act",
    "intermediate_size",
    "num_key_value_heads",
    "text_config",
    "layer_types",
    "mlp_layer_types",
    "num_nextn_predict_layers",
)


@functools.cache
def stated() -> dict[str, Any]:
    """By family: `keys` that its authors' configs have, `defaults` of its authors' code, with sources."""
    found: dict[str, Any] = {}
    for file in ("stated.yaml", "read_originals.yaml"):
        read = yaml.safe_load((_TESTS / "data" / file).read_text(encoding="utf-8"))
        for name, said in read.items():
            known = found.setdefault(name, {})
            for kind, each in said.items():
                known[kind] = {**known[kind], **each} if kind in known else each
    return found


def _names(value: Any) -> Iterator[str]:
    """Every key of a config, at every level."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _names(each)
    elif isinstance(value, list):
        for each in value:
            yield from _names(each)


@functools.cache
def mlx_lm_arguments(model_type: str) -> dict[str, Any] | None:
    """The settings of mlx-lm's model of this name with their defaults (MISSING for none), or None."""
    if importlib.util.find_spec(f"mlx_lm.models.{model_type}") is None:
        return None
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    found: dict[str, Any] = {}
    for name in ("ModelArgs", "TextArgs", "TextConfig", "TextModelArgs"):
        kind = getattr(module, name, None)
        if dataclasses.is_dataclass(kind):
            found |= {
                field.name: field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
                for field in dataclasses.fields(kind)
            }
    return found


@functools.cache
def _carried() -> dict[str, set[str]]:
    """By family, the keys of every config that this repository carries."""
    known, found = catalog(), {}
    for file in [*_TESTS.glob("cases/*/*/*/config*.json"), *_TESTS.glob("data/prediction/*/config.json")]:
        config = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(known.resolve(config).name, set()).update(_names(config))
    for model in models():
        found.setdefault(model.family, set()).update(_names(model.config))
    return found


@functools.cache
def known_keys(name: str, model_types: tuple[str, ...]) -> frozenset[str]:
    """Every key that transformers, mlx-lm, a carried config or the authors know for these model types."""
    found: set[str] = {*COMMON, *_carried().get(name, ())}
    found.update(key for keys in stated().get(name, {}).get("keys", {}).values() for key in keys)
    base = read_yaml(Catalog().path(name))[0].get("extends")
    if base is not None:
        found |= known_keys(base, Catalog().entries[base].model_types)
    for model_type in (*model_types, *stated().get(name, {}).get("as", ())):
        if model_type in CONFIG_MAPPING_NAMES:
            kind = CONFIG_MAPPING[model_type]
            found.update(_names(class_plans.class_config(model_type)))
            for each in (kind, *kind.sub_configs.values()):
                found.update(getattr(each, "attribute_map", {}))
        found.update(mlx_lm_arguments(model_type) or ())
    return frozenset(found)


def keys_of(family: Family) -> set[str]:
    """Every config key that a family reads, each part of a dotted one by itself."""
    found = {key for ref in references(family) for key in ref.keys}
    found |= {key for mixer in mixers(family).values() for ref in references(mixer) for key in ref.keys}
    for rule in (*(family.layer_types or ()), *family.moe.layers):
        found |= {str(getattr(rule, field)) for field in ("key", "dense") if hasattr(rule, field)}
    found |= set(family.text_keys) if family.text_config else set()
    if family.when is not None:
        found |= {key for key in (family.when.has, family.when.lacks) if key} | set(family.when.equals or ())
    return {part for key in found for part in key.split(".") if _WORDS.match(part)}


def unknown(family: Family) -> set[str]:
    """The keys that a family reads and nobody knows."""
    return keys_of(family) - known_keys(family.family, family.model_types)


def unread(family: Family) -> set[str]:
    """The keys that are listed as the authors' own and that the family does not read."""
    own = stated().get(family.family, {})
    return {key for keys in own.get("keys", {}).values() for key in keys} - keys_of(family)


def check_names(name: str, catalog: Catalog) -> None:
    """The names that the authors' files and transformers' mappings have lead to the family.

    Raises:
        AssertionError: one does not.
    """
    entry, own = catalog.entries[name], stated().get(name, {})
    for row in own.get("names", ()):
        assert row in (*entry.model_types, *entry.architectures), f"{row} is no name of {name}"
    for row in own.get("types", ()):
        assert row in entry.model_types, f"{row} is no model type of {name}"
    for row in own.get("classes", ()):
        assert row in entry.architectures, f"{row} is no architecture of {name}"
    for config in own.get("configs", ()):
        assert catalog.for_config(config).family == name, f"{config} is another family's"
    for model_type, classes in architectures().items():
        others = any(model_type in e.model_types for e in catalog.entries.values() if e.name != name)
        if classes & set(entry.architectures) and not others and model_type not in own.get("not_names", ()):
            assert model_type in entry.model_types, f"{model_type} is no name of {name}"
    for model_type in entry.model_types:
        text = _text_half(model_type)
        others = any(text in e.model_types for e in catalog.entries.values() if e.name != name)
        if text and not others and text not in own.get("not_names", ()):
            assert text in entry.model_types, f"{text} is no name of {name}"
        for architecture in architectures().get(model_type, ()):
            if architecture not in own.get("not_names", ()):
                assert architecture in entry.architectures, f"{architecture} is no name of {name}"


@functools.cache
def _text_half(model_type: str) -> str:
    """The model type of the text settings that transformers' config class of a type has, or nothing."""
    kind = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING_NAMES else None
    part = kind.sub_configs.get("text_config") if kind is not None else None
    return str(getattr(part, "model_type", ""))


@functools.cache
def architectures() -> dict[str, set[str]]:
    """By model type, the classes of transformers that generate text with it, read from its source."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    found: dict[str, set[str]] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        names = [ast.unparse(each) for each in node.targets] if isinstance(node, ast.Assign) else []
        if names and names[0] in _MAPPINGS and isinstance(node.value, ast.Call):
            pairs = node.value.args[0]
            assert isinstance(pairs, ast.List)
            for pair in pairs.elts:
                if isinstance(pair, ast.Starred):
                    # Another mapping, whose classes are those of another list here.
                    continue
                key, value = ast.literal_eval(pair)
                found.setdefault(key, set()).update((value,) if isinstance(value, str) else value)
    return found


@functools.cache
def _held(name: str) -> dict[str, Any]:
    """Defaults that the family's authors, or mlx-lm where transformers has no class, give."""
    family = catalog().load(name)
    found = dict(stated().get(name, {}).get("defaults", {}))
    if not class_plans.class_types(family):
        skipped = {*stated().get(name, {}).get("otherwise", {}), *_NEVER}
        for model_type in family.model_types:
            for key, value in (mlx_lm_arguments(model_type) or {}).items():
                if isinstance(value, bool | int | float | str) and key not in skipped:
                    found.setdefault(key, value)
    return found


def missed_stated(family: Family) -> dict[str, Any]:
    """By key, what a config that leaves it out means otherwise than the stated default."""
    read, found = keys_of(family), {}
    defaulted = {key for ref in references(family) if not ref.required for key in ref.keys}
    tiny = tiny_config(family)
    for key, value in _held(family.family).items():
        if key not in read:
            continue
        for make in (lambda: tiny, lambda: _roomy(family, tiny)):
            config = make()
            level = config[family.text_keys[0]] if family.text_config else config
            kept = level.get(key)
            level[key] = value
            try:
                want = class_plans.plan_values(family, config)
                del level[key]
                odd: Any = class_plans.differences(want, class_plans.plan_values(family, config))
            except RegistryError as error:
                # Other sizes of the tiny config do not go with it, or it is a size that every config states.
                odd = str(error) if key not in level and key in defaulted - _WIDTHS else {}
                fits = key not in level
            else:
                fits = True
            level.pop(key, None)
            if kept is not None:
                level[key] = kept
            if odd:
                found[key] = odd
            if fits:
                break
    return found


def _roomy(family: Family, tiny: dict[str, Any]) -> dict[str, Any]:
    """The tiny config with more experts than any original picks."""
    config = copy.deepcopy(tiny)
    level = config[family.text_keys[0]] if family.text_config else config
    for ref in references(family.config.num_experts):
        for key in ref.keys:
            if isinstance(level.get(key), int):
                level[key] = 1024
    return config


def missed_nulls(family: Family) -> dict[str, Any]:
    """By key, plan values that are not what the original makes of a null under this key."""
    config = tiny_config(family)
    level = config[family.text_keys[0]] if family.text_config else config
    read, found = keys_of(family), {}
    for key, wanted in stated()["*"]["nulls"].items():
        if key not in read or family.family in wanted.get("not", ()) or not _takes_null(family, key):
            continue
        kept = level.get(key)
        level[key] = None
        try:
            plan = class_plans.plan_values(family, config)
        except RegistryError as error:
            found[key] = str(error)
        else:
            ends = wanted["means"]
            odd = {at: v for at, v in plan.items() for end in ends if at.endswith(end) and v != ends[end]}
            if odd:
                found[key] = odd
        if kept is None:
            del level[key]
        else:
            level[key] = kept
    return found


def _takes_null(family: Family, key: str) -> bool:
    """Whether transformers' class of a family takes a null under a key; others refuse it."""
    for model_type in class_plans.source_types(family):
        kind = CONFIG_MAPPING[model_type]
        for each in (kind, *kind.sub_configs.values()):
            for field in dataclasses.fields(each) if dataclasses.is_dataclass(each) else ():
                if field.name == key and "None" in str(field.type):
                    return True
    return False


def missed_words(family: Family) -> dict[str, Any]:
    """By place, what a family says otherwise than its original's code, where only reading it tells."""
    said = stated().get(family.family, {}).get("says", {})
    return dict(_otherwise(said, family.model_dump(by_alias=True), ""))


def _otherwise(said: Any, found: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Where a part of a section says something else; a key may name a place by several keys with dots."""
    if isinstance(said, list) and isinstance(found, str):
        # A single key may stand alone.
        found = [found]
    if isinstance(said, dict) and isinstance(found, list | tuple):
        found = dict(enumerate(found))
    if isinstance(said, dict) and isinstance(found, dict):
        for key, value in said.items():
            below = found
            for each in key.split(".") if isinstance(key, str) else (key,):
                below = below[int(each)] if isinstance(below, list | tuple) else below.get(each)
            yield from _otherwise(value, below, f"{at}.{key}" if at else str(key))
    elif isinstance(said, list) and isinstance(found, list | tuple) and len(said) == len(found):
        for i, (value, each) in enumerate(zip(said, found, strict=True)):
            yield from _otherwise(value, each, f"{at}.{i}")
    elif said != found or type(said) is not type(found):
        yield at, (said, found)


def check_stated(family: Family) -> None:
    """Raises AssertionError where a stated key, default, null or constant is missed."""
    assert not unread(family), unread(family)
    for missed in (missed_stated(family), missed_nulls(family), missed_words(family)):
        assert not missed, missed
