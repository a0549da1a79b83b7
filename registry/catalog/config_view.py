"""Reading values out of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_experts.registry.errors import ConfigError


class ConfigView:
    """A config.json seen through its nested text settings.

    Args:
        config: the whole config.
        text_keys: dotted keys of nested text settings, of which the first present one is used; they win
            over the top level where both have a key.
    """

    def __init__(self, config: Mapping[str, Any], text_keys: tuple[str, ...] = ("text_config",)) -> None:
        found = ((key, _at(config, key)) for key in text_keys)
        self.nested, nested = next(
            ((key, value) for key, value in found if isinstance(value, Mapping)), ("", None)
        )
        self.levels: tuple[Mapping[str, Any], ...] = (config,) if nested is None else (nested, config)

    def get(self, key: str, outer: bool = False) -> Any:
        """The value of a dotted key, or None where it is absent or null (the two mean the same).

        Args:
            outer: the top level wins over nested text settings.
        """
        for level in reversed(self.levels) if outer else self.levels:
            value = _at(level, key)
            if value is not None:
                return value
        return None

    def mapping(self, key: str) -> dict[str, Any]:
        """The object under a dotted key, empty where it is absent or null.

        Raises:
            ConfigError: something else stands there.
        """
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        raise ConfigError(
            f"'{key}' is not an object", where="config.json", expected="{ … } or null", found=repr(value)[:80]
        )

    def is_null(self, key: str) -> bool:
        """Whether a dotted key is there and null."""
        parents, _, last = key.rpartition(".")
        for level in self.levels:
            value = _at(level, parents) if parents else level
            if isinstance(value, Mapping) and last in value and value[last] is None:
                return True
        return False


def _at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, numbers picking from lists; None where the way to it breaks off."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
