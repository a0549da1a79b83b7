"""What transformers' config classes say of every described model type, and how it differs from a record.

A family file reads config keys and states what holds where a key is absent. Both come from the original's
config class. A key that appears there, or a default that changes, may make a family file wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.errors import CheckFailed, SettingError

Keys = dict[str, Any]
REQUIRED = "(required)"
COMPUTED = "(computed)"
# The record holds what these packages had.
PACKAGES = ("mlx-lm", "transformers")


@dataclass(frozen=True)
class Drift:
    """One difference between a record and what is installed.

    Args:
        model_type: whose config class.
        key: the config key; nothing where the whole class came or went.
        was, now: its default, or nothing where there was none.
    """

    model_type: str
    key: str
    was: str
    now: str

    def __str__(self) -> str:
        what = f"{self.model_type}.{self.key}" if self.key else self.model_type
        return f"{what}: was {self.was or 'absent'}, is {self.now or 'absent'}"


def class_keys(model_type: str) -> Keys | None:
    """The config keys of a model type with their defaults, nested text settings under ``text_config.``.

    Returns:
        Literals for defaults, `REQUIRED` and `COMPUTED` where there is no literal; None where the installed
        transformers has no such type.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if model_type not in CONFIG_MAPPING:
        return None
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    return _keys_of(CONFIG_MAPPING[model_type], base, "")


def _keys_of(kind: Any, base: set[str], prefix: str) -> Keys:
    keys: Keys = {}
    for field in dataclasses.fields(kind):
        if field.name in base:
            continue
        if field.name in kind.sub_configs:
            if "text" in field.name:
                nested = kind.sub_configs[field.name]
                if dataclasses.is_dataclass(nested):
                    keys.update(_keys_of(nested, base, f"{prefix}{field.name}."))
                else:
                    # Any model's config may stand here; that of the default type has keys of its own.
                    keys[f"{prefix}{field.name}.model_type"] = kind.sub_configs_defaults[
                        field.name
                    ].model_type
            continue
        keys[prefix + field.name] = _literal(field)
    return keys


def _literal(field: dataclasses.Field[Any]) -> Any:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return REQUIRED
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return COMPUTED


def installed_keys(catalog: Catalog) -> dict[str, Keys]:
    """The keys of every model type that a family answers to and the installed transformers has."""
    types = sorted({t for entry in catalog.entries.values() for t in entry.model_types})
    found = {model_type: class_keys(model_type) for model_type in types}
    return {model_type: keys for model_type, keys in found.items() if keys is not None}


def installed_versions() -> dict[str, str]:
    """The versions of the packages that a record is about; those that are not installed are left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def record(path: Path, known: Mapping[str, Iterable[str]], keys: Mapping[str, Keys]) -> None:
    """Write what is installed now: versions, the model types of each neighbour, the keys of each class."""
    content = {
        "versions": installed_versions(),
        "model_types": {source: sorted(types) for source, types in known.items()},
        "config_keys": keys,
    }
    path.write_text(json.dumps(content, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """A record as :func:`record` wrote it.

    Raises:
        SettingError: the file is absent or no record.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"versions": {}, "model_types": {}, **content, "config_keys": dict(content["config_keys"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            "the record of the neighbours cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {error}"[:200],
            hint="make it again with `registry coverage --record FILE`",
        ) from error


def drift(was: Mapping[str, Keys], now: Mapping[str, Keys]) -> list[Drift]:
    """What appeared, went or changed its default, by model type and key."""
    found = []
    for model_type in sorted({*was, *now}):
        before, after = was.get(model_type), now.get(model_type)
        if before is None or after is None:
            states = ["" if each is None else "class" for each in (before, after)]
            found.append(Drift(model_type, "", *states))
            continue
        for key in sorted({*before, *after}):
            pair = tuple(json.dumps(each[key]) if key in each else "" for each in (before, after))
            if pair[0] != pair[1]:
                found.append(Drift(model_type, key, *pair))
    return found


def refuse_drift(found: list[Drift], path: Path) -> None:
    """Fail where anything has changed.

    Raises:
        CheckFailed: listing it.
    """
    if found:
        raise CheckFailed(
            f"{len(found)} facts of the neighbours have changed since the record",
            where=str(path),
            found="\n".join(map(str, found[:40])) + ("\n…" if len(found) > 40 else ""),
            hint="look at each family that reads them, then record again with `registry coverage --record`",
        )
