"""What the catalogue knows of config keys and names: who reads a key where, and calls a leaf what."""

from __future__ import annotations

import difflib
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.resolve.tiny_config import config_keys
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec

_PARTIAL = "partial_rotary_factor"
_SECTIONS = ("embedding", "norm", "block", "attention", "dense", "moe", "head")


def plain(value: Any, *, whole: bool = False) -> Any:
    """A part of a family as YAML would hold it.

    Args:
        whole: state every field, those that stand at their default too.
    """
    if isinstance(value, Ref):
        dumped = value.model_dump(by_alias=True, exclude_unset=True)
        return {key: plain(each) for key, each in dumped.items()}
    if isinstance(value, Spec):
        fields = type(value).model_fields
        return {
            info.alias or name: plain(getattr(value, name), whole=whole)
            for name, info in fields.items()
            if whole or name in value.model_fields_set
        }
    if isinstance(value, tuple | list):
        return [plain(each, whole=whole) for each in value]
    if isinstance(value, Mapping):
        return {key: plain(each, whole=whole) for key, each in value.items()}
    return value


def is_gqa(mixer: Any) -> bool:
    """Whether a family's mixer is grouped-query attention."""
    return mixer is not None and mixer.kind == "gqa"


def get(data: Any, path: str) -> Any:
    """What stands at a dotted path of nested mappings; None where nothing does."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path of nested mappings, which are made on the way."""
    *parents, last = path.split(".")
    for part in parents:
        inner = data.get(part)
        if not isinstance(inner, dict) or "from" in inner:
            inner = {}
            data[part] = inner
        data = inner
    data[last] = value


def take_out(data: dict[str, Any], path: str) -> None:
    """Remove a dotted path of nested mappings, where it is there."""
    parent, _, last = path.rpartition(".")
    inner = get(data, parent) if parent else data
    if isinstance(inner, dict):
        inner.pop(last, None)


@dataclass(frozen=True)
class Reading:
    """One family's way of reading something.

    Args:
        family: its name.
        path: dotted key of the family file.
        value: what stands there.
    """

    family: str
    path: str
    value: Any


class Evidence:
    """What a set of families says.

    Args:
        catalog: the families.
        names: those of them that may be asked.
    """

    def __init__(self, catalog: Catalog, names: list[str]) -> None:
        self.families: dict[str, Family] = {name: catalog.load(name) for name in names}
        self._keys: dict[str, set[str]] = {}
        self._raw: dict[str, dict[str, Any]] = {}

    @functools.cached_property
    def by_key(self) -> dict[str, list[Reading]]:
        """Who reads a config key, and where; places that stand alone only, such as `moe.router.scale`."""
        found: dict[str, list[Reading]] = defaultdict(list)
        for name, family in self.families.items():
            for section in _SECTIONS:
                for path, ref in references(section, getattr(family, section)):
                    for key in ref.keys:
                        found[key].append(Reading(name, path, plain(ref)))
        return found

    @functools.cached_property
    def by_leaf(self) -> dict[str, list[Reading]]:
        """Which part of `attention` or `moe` holds a name of a module, and the family that calls it so."""
        found: dict[str, list[Reading]] = defaultdict(list)
        for name, family in self.families.items():
            for section in ("attention", "moe"):
                node = getattr(family, section)
                for field in type(node).model_fields if isinstance(node, Spec) else ():
                    part = getattr(node, field)
                    for leaf in _leaves(part):
                        found[leaf].append(Reading(name, f"{section}.{field}", plain(part)))
        return found

    def keys_read(self, name: str) -> set[str]:
        """Every top-level config key that a family reads."""
        if name not in self._keys:
            self._keys[name] = keys_read(self.families[name])
        return self._keys[name]

    def raw(self, name: str) -> dict[str, Any]:
        """A family as one mapping."""
        if name not in self._raw:
            self._raw[name] = plain(self.families[name])
        return self._raw[name]

    def reading(self, key: str) -> list[Reading]:
        """The ways in which a key is read, the most common place first, one a family."""
        readings = self.by_key.get(key, [])
        places = Counter(each.path for each in readings)
        values = Counter((each.path, str(each.value)) for each in readings)
        ranked = sorted(readings, key=lambda r: (-places[r.path], -values[r.path, str(r.value)], r.family))
        distinct = {(each.path, str(each.value)): each for each in reversed(ranked)}
        return list(reversed(distinct.values()))


def keys_read(family: Family) -> set[str]:
    """Every top-level config key that a family reads.

    The share of a head that rotates is always read inside `rope_parameters`, and beside them only by a family
    that says so.
    """
    refs = (
        ref for section in Family.model_fields for _, ref in references(section, getattr(family, section))
    )
    beside = {_PARTIAL} & {key for ref in refs for key in ref.keys}
    return (config_keys(family) - {_PARTIAL}) | beside


def references(at: str, value: Any) -> Iterator[tuple[str, Ref]]:
    """Every reference of a section, with its dotted place; those inside others are left out."""
    if isinstance(value, Ref):
        yield at, value
    elif isinstance(value, Spec):
        for name, info in type(value).model_fields.items():
            yield from references(f"{at}.{info.alias or name}", getattr(value, name))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Spec) and not isinstance(value, Ref):
        for name in value.model_fields_set:
            yield from _leaves(getattr(value, name))


def alike(name: str, other: str) -> float:
    """How much two names of model types have in common, from 0 to 1; the first letters count most."""
    a, b = name.lower(), other.lower()
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return 0.5 * difflib.SequenceMatcher(None, a, b).ratio() + 0.5 * min(shared, 8) / 8
