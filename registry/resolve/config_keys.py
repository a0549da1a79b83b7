"""The key of config.json that a family file reads a number from, and a config with another number there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_experts.registry.spec.values import Ref

# Where a multimodal config keeps what is the text model's.
_TEXT = ("text_config", "llm_config")


def keys_of(value: object) -> tuple[str, ...]:
    """The config keys that a value of a family file is read from."""
    return value.keys if isinstance(value, Ref) else ()


def put_key(config: Mapping[str, Any], keys: Sequence[str], value: object) -> dict[str, Any] | None:
    """A config with ``value`` under the first of the keys that it states; None where it states none."""
    for key in keys:
        *parents, leaf = key.split(".")
        for start in ((), *((name,) for name in _TEXT)):
            path = (*start, *parents)
            holder = _at(config, path)
            if holder is not None and holder.get(leaf) is not None:
                return _with(config, path, leaf, value)
    return None


def _at(config: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any] | None:
    found: Any = config
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _with(config: Mapping[str, Any], path: Sequence[str], leaf: str, value: object) -> dict[str, Any]:
    if not path:
        return {**config, leaf: value}
    return {**config, path[0]: _with(config[path[0]], path[1:], leaf, value)}
