"""What settings mean that authors' files have and no class of transformers reads, by family.

`tests/data/stated.yaml` and `read_originals.yaml` say under

    alike   names of one setting: each of them alone, with the same value, gives the same plan, and another
            one than none of them
    means   what given settings come to, as ends of places in a plan; those of prediction layers begin with
            `mtp.`
    nested  where files keep the text settings

A name with dots is of nested settings, one with `outer.` before it stands beside the text settings.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from class_plans import differences, leaves, plan_of
from config_keys import stated

from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.resolver import Resolver
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family

OUTER = "outer."


def _values(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every literal of a config's plan, also those that tests against classes leave out."""
    return dict(leaves(plan_of(family, config)))


def made(family: Family, given: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The tiny config with other settings."""
    config = copy.deepcopy(tiny_config(family))
    level = config[family.text_keys[0]] if family.text_config else config
    for name in without:
        *parts, last = name.removeprefix(OUTER).split(".")
        at = config if name.startswith(OUTER) else level
        for part in parts:
            at = at.get(part) or {}
        at.pop(last, None)
    for name, value in given.items():
        *parts, last = name.removeprefix(OUTER).split(".")
        at = config if name.startswith(OUTER) else level
        for part in parts:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[last] = value
    return config


def missed_alike(family: Family) -> dict[str, Any]:
    """By name, what a setting under it means otherwise than under the first of its names."""
    found: dict[str, Any] = {}
    for row in stated().get(family.family, {}).get("alike", ()):
        names, given = row["names"], row.get("given", {})
        without = (*names, *row.get("without", ()))
        want = _values(family, made(family, {**given, names[0]: row["value"]}, without))
        try:
            none: dict[str, Any] = _values(family, made(family, given, without))
        except RegistryError:
            # A setting that every config states.
            none = {}
        if not differences(want, none):
            found[names[0]] = "changes nothing"
        for name in names[1:]:
            try:
                got = _values(family, made(family, {**given, name: row["value"]}, without))
            except RegistryError as error:
                found[name] = str(error)
            else:
                if odd := differences(want, got):
                    found[name] = odd
    return found


def missed_means(family: Family) -> dict[str, Any]:
    """By given settings, plan values that are not what they come to."""
    found: dict[str, Any] = {}
    for row in stated().get(family.family, {}).get("means", ()):
        given, label = (
            row.get("given", {}),
            ", ".join(map(str, [*row.get("given", ()), *row.get("without", ())])),
        )
        try:
            config = made(family, given, tuple(row.get("without", ())))
            plan = _values(family, config)
            if any(end.startswith("mtp.") for end in row["plan"]):
                plan |= dict(
                    leaves(
                        Resolver(family.family, plan_of(family, config).config).spec(family.mtp, 0, "mtp"),
                        "mtp",
                    )
                )
        except RegistryError as error:
            found[label] = str(error)
            continue
        for end, value in row["plan"].items():
            got = {at: v for at, v in plan.items() if at.endswith(end)}
            if not got or any(v != value or type(v) is not type(value) for v in got.values()):
                found[f"{label}: {end}"] = (value, got or "no such place")
    return found


def missed_nested(family: Family) -> dict[str, Any]:
    """By key, what text settings under it mean otherwise than under the first."""
    found: dict[str, Any] = {}
    tiny = tiny_config(family)
    for name in stated().get(family.family, {}).get("nested", ()):
        config = {key: value for key, value in tiny.items() if key != family.text_keys[0]}
        *parts, last = name.split(".")
        at: dict[str, Any] = config
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = tiny[family.text_keys[0]]
        try:
            odd: Any = differences(_values(family, tiny), _values(family, config))
        except RegistryError as error:
            odd = str(error)
        if odd:
            found[name] = odd
    return found


def check(family: Family) -> None:
    """Raises AssertionError where stated settings mean something else."""
    for missed in (missed_alike(family), missed_means(family), missed_nested(family)):
        assert not missed, missed
