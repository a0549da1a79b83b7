"""Expands the rules of ``registry.rules`` to one value for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlx_experts.registry.catalog.config_view import ConfigView
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.spec import layer_rules as rules
from mlx_experts.registry.spec.values import Ref


class ReadsRefs(Protocol):
    """What an expansion needs of a resolver."""

    def value(self, value: Any, layer: int) -> Any:
        """A literal for a literal or a reference."""

    def source(self, value: Any, layer: int) -> str | None:
        """The config key that a value is read from, or None."""


def expand_moe_layers(
    layer_rules: tuple[rules.LayerRule, ...], view: ConfigView, count: int, resolver: ReadsRefs
) -> list[bool]:
    """Whether each layer has experts, by the first rule that applies.

    Raises:
        ConfigError: no rule applies, or a list is too short.
    """
    rule = _first_that_applies(layer_rules, view, "which layers have experts")
    return [_has_experts(rule, i, view, count, resolver) for i in range(count)]


def expand_types(
    type_rules: tuple[rules.TypeRule, ...] | None, view: ConfigView, count: int, resolver: ReadsRefs
) -> list[str]:
    """The type of each layer, by the first rule that applies; `full_attention` without rules.

    Raises:
        ConfigError: no rule applies, a list is too short, or a value is not known.
    """
    if type_rules is None:
        return ["full_attention"] * count
    rule = _first_that_applies(type_rules, view, "which type each layer has")
    return [_type(rule, i, view, count, resolver) for i in range(count)]


def _first_that_applies(listed: Sequence[Any], view: ConfigView, what: str) -> Any:
    """The rule that the config chooses.

    Raises:
        ConfigError: it chooses none, so that it does not say ``what``.
    """
    for rule in listed:
        if _applies(rule, view):
            return rule
    raise ConfigError(
        f"config.json does not say {what}",
        where="config.json",
        expected=f"one of {', '.join(key for rule in listed for key in _keys(rule))}",
    )


def _keys(rule: Any) -> list[str]:
    """Config keys whose presence makes a rule apply."""
    match rule:
        case rules.ListRule() | rules.TypeList() | rules.IndexRule():
            return [rule.key]
        case rules.TypeLetters() | rules.TypeIndices():
            return [rule.key]
        case rules.FirstDense():
            return _needed(rule.first)
        case rules.SparseStep():
            return _needed(rule.step)
        case rules.Periodic() | rules.TypePeriodic():
            return _needed(rule.period)
    return []


def _needed(value: Any) -> list[str]:
    return list(value.keys) if isinstance(value, Ref) and value.required else []


def _applies(rule: Any, view: ConfigView) -> bool:
    keys = _keys(rule)
    if not any(view.get(key) is not None for key in keys) and keys:
        return False
    if isinstance(rule, rules.TypeLetters):
        return isinstance(view.get(rule.key), str | list)
    if isinstance(rule, rules.TypeList) and rule.empty_is_absent and view.get(rule.key) == []:
        return False
    if isinstance(rule, rules.TypeList | rules.ListRule):
        return isinstance(view.get(rule.key), list)
    return True


def _entry(view: ConfigView, key: str, i: int, count: int) -> Any:
    value = view.get(key)
    if not isinstance(value, list | str) or len(value) < count:
        raise ConfigError(
            f"'{key}' does not have an entry for every layer",
            where="config.json",
            expected=f"{count} entries",
            found=f"{len(value)} entries" if isinstance(value, list | str) else repr(value)[:60],
        )
    return value[i]


def _has_experts(rule: Any, i: int, view: ConfigView, count: int, resolver: ReadsRefs) -> bool:
    match rule:
        case rules.AllLayers():
            return bool(resolver.value(rule.enabled, i))
        case rules.ListRule():
            entry = _entry(view, rule.key, i, count)
            return entry == "sparse" if isinstance(entry, str) else bool(entry)
        case rules.FirstDense():
            every = _count(rule.every, i, resolver)
            return i >= _count(rule.first, i, resolver, least=0) and i % every == 0
        case rules.SparseStep():
            excepted = view.get(rule.dense)
            dense = set(rule.otherwise) if excepted is None else _indices(excepted, rule.dense)
            step = _count(rule.step, i, resolver, least=0)
            return step > 0 and i not in dense and (i + 1) % step == 0
        case rules.Periodic():
            return _in_turn(rule, i, resolver)
        case rules.RangeRule():
            first, last = _bound(rule.start, i, resolver, min), _bound(rule.end, i, resolver, max)
            last = count - 1 if last is None or last == -1 else last
            return (first or 0) <= i <= last and (i + 1) % _count(rule.interval, i, resolver) == 0
        case rules.IndexRule():
            return i in _indices(view.get(rule.key), rule.key)
    raise AssertionError(f"no expansion for {type(rule).__name__}")


def _type(rule: Any, i: int, view: ConfigView, count: int, resolver: ReadsRefs) -> str:
    if isinstance(rule, rules.TypeList | rules.TypePeriodic) and rule.last is not None and i == count - 1:
        return rule.last
    if isinstance(rule, rules.TypePeriodic) and rule.first is not None and i == 0:
        return rule.first
    match rule:
        case rules.TypeList() | rules.TypeLetters():
            if isinstance(rule, rules.TypeLetters) and rule.repeats and view.get(rule.key):
                entry = view.get(rule.key)[i % len(view.get(rule.key))]
            else:
                entry = _entry(view, rule.key, i, count)
            types: Mapping[Any, str] | None = rule.map
            if types is None:
                return str(entry)
            if not isinstance(entry, str | int | bool) or entry not in types:
                raise ConfigError(
                    f"'{rule.key}' holds a layer type that is not known",
                    where=f"config.json, layer {i}",
                    expected=", ".join(map(str, types)),
                    found=repr(entry)[:60],
                )
            return types[entry]
        case rules.TypePeriodic():
            period = _count(rule.period, i, resolver)
            if rule.tail is not None and i >= count // period * period:
                return rule.tail
            return rule.is_ if _in_turn(rule, i, resolver) else rule.otherwise
        case rules.TypeIndices():
            listed = i + rule.base in _indices(view.get(rule.key), rule.key)
            return rule.is_ if listed else rule.otherwise
        case rules.TypeRange():
            start, stop = _count(rule.start, i, resolver, least=0), resolver.value(rule.stop, i)
            inside = start <= i and (stop is None or i < _count(stop, i, resolver, least=0))
            picked = inside and (i - start) % _count(rule.every, i, resolver) == 0
            return rule.is_ if picked and resolver.value(rule.enabled, i) else rule.otherwise
        case rules.TypePattern():
            return rule.types[i % len(rule.types)]
    raise AssertionError(f"no expansion for {type(rule).__name__}")


def _in_turn(rule: rules.Periodic | rules.TypePeriodic, i: int, resolver: ReadsRefs) -> bool:
    """Whether a layer is the one of its period that a rule picks."""
    period = _count(rule.period, i, resolver)
    offset = period - 1 if rule.offset == "last" else _count(rule.offset, i, resolver, least=0)
    return i % period == offset


def _count(value: Any, i: int, resolver: ReadsRefs, least: int = 1) -> int:
    """A number of layers to count by, or of a layer."""
    number = resolver.value(value, i)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        key = resolver.source(value, i)
        raise ConfigError(
            "layers cannot be counted by this number",
            where="the family file" if key is None else f"config.json, {key}",
            expected=f"a whole number of at least {least}",
            found=repr(number)[:60],
        )
    return number


def _bound(value: Any, i: int, resolver: ReadsRefs, pick: Callable[[list[int]], int]) -> int | None:
    """One end of a range of layers, of a list the outermost; None for no bound."""
    found = resolver.value(value, i)
    numbers = found if isinstance(found, list) else [] if found is None else [found]
    return pick([_count(n, i, resolver, least=-1) for n in numbers]) if numbers else None


def _indices(value: Any, key: str) -> set[int]:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return {int(part) for part in parts if str(part).strip()}
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"'{key}' is not a list of layer indices", where="config.json", found=repr(value)[:60]
        ) from error
