"""Reading values out of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigView:
    """A config.json seen through its nested text settings.

    Args:
        config: the whole config.
        text_key: key of nested text settings; they win over the top level where both have a key.
    """

    def __init__(self, config: Mapping[str, Any], text_key: str | None = "text_config") -> None:
        nested = config.get(text_key) if text_key else None
        self.levels: tuple[Mapping[str, Any], ...] = (
            (nested, config) if isinstance(nested, Mapping) else (config,)
        )

    def get(self, key: str, outer: bool = False) -> Any:
        """The value of a dotted key, or None where it is absent or null (the two mean the same).

        Args:
            outer: the top level wins over nested text settings.
        """
        for level in reversed(self.levels) if outer else self.levels:
            value: Any = level
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def is_null(self, key: str) -> bool:
        """Whether a dotted key is there and null."""
        *parents, last = key.split(".")
        for level in self.levels:
            value: Any = level
            for part in parents:
                value = value.get(part) if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and last in value and value[last] is None:
                return True
        return False
