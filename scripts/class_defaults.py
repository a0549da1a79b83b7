"""Writes registry/resolve/class_defaults.yaml from the config classes of the installed transformers.

    python scripts/class_defaults.py [--check]

For every model type that a family names and transformers has: the values of the keys that the family reads
and has no default for, or null. With --check nothing is written; a file that would change is an error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.references import references

FILE = Path(__file__).parent.parent / "registry" / "resolve" / "class_defaults.yaml"
HEAD = "# Written by scripts/class_defaults.py from transformers' config classes.\n"


def class_config(model_type: str) -> dict[str, Any] | None:
    """The config.json of a class's defaults, or None where transformers has no class of this name."""
    if model_type not in CONFIG_MAPPING_NAMES:
        return None
    logging.disable(logging.WARNING)
    kind = CONFIG_MAPPING[model_type]
    # Text settings that are absent as a whole are another matter than one of their keys.
    parts = {key: {} for key, part in kind.sub_configs_defaults.items() if "text" in key and part.init_kwargs}
    config: dict[str, Any] = json.loads(kind(**parts).to_json_string(use_diff=False))
    return config


def worked_out(kind: Any, inner: Set[str]) -> set[str]:
    """Keys that a class works out from others where a config leaves them out: no literal stands for them.

    Args:
        inner: keys of its settings of the text model; those of towers are left alone.
    """
    found = {field.name for field in dataclasses.fields(kind) if field.default is None}
    for key in kind.sub_configs.keys() & inner:
        part = kind.sub_configs_defaults.get(key)
        nested = kind.sub_configs[key] if part is None else part.get_config_class(part.model_type)
        found |= worked_out(nested, inner)
    return found


def at(config: Any, key: str) -> Any:
    """The value of a dotted key, or None."""
    for part in key.split("."):
        if isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        else:
            config = config.get(part) if isinstance(config, Mapping) else None
    return config


def text_level(family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested text settings of a config, or all of it."""
    nested = [at(config, key) for key in family.text_keys] if family.text_config else []
    return next((level for level in nested if isinstance(level, Mapping)), config)


def value_of(key: str, *levels: Mapping[str, Any]) -> Any:
    """The first value of a key in these settings; classes keep a rotation's own in `rope_parameters`."""
    for level in levels:
        for path in (key, f"rope_parameters.{key}"):
            if (value := at(level, path)) is not None:
                return value
    return None


def needed(family: Family, model_type: str) -> dict[str, Any]:
    """The class's values of the keys that a family has no default for."""
    whole = class_config(model_type)
    if whole is None:
        return {}
    inner = {key for keys in family.text_keys for key in keys.split(".")}
    text, found, computed = text_level(family, whole), {}, worked_out(CONFIG_MAPPING[model_type], inner)
    for ref in references(family):
        values = [(key, value_of(key, text, whole)) for key in ref.keys]
        given = next(((key, value) for key, value in values if value is not None), None)
        open_ended = ref.required or ref.default is None
        if given is None or given[0].rpartition(".")[2] in computed:
            continue
        if open_ended and not isinstance(given[1], Mapping | list):
            found[given[0]] = given[1]
    return found


def table() -> dict[str, dict[str, Any]]:
    """The whole file's content."""
    known = Catalog()
    families = [known.load(name) for name in known.names()]
    found: dict[str, dict[str, Any]] = {}
    for family in families:
        for model_type in family.model_types:
            found.setdefault(model_type, {}).update(needed(family, model_type))
    return {name: dict(sorted(found[name].items())) for name in sorted(found) if found[name]}


def text() -> str:
    """The file."""
    rows = [
        f"{name}: {yaml.safe_dump(values, default_flow_style=True, width=10**6).strip()}\n"
        for name, values in table().items()
    ]
    return HEAD + "".join(rows)


def main() -> int:
    """Write the file, or compare it."""
    if "--check" in sys.argv[1:]:
        if FILE.read_text(encoding="utf-8") != text():
            print(f"{FILE} is not what the installed transformers gives; run scripts/class_defaults.py")
            return 1
        return 0
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
