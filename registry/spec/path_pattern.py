"""The one way in which tensors and modules are matched by their paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PathMatch:
    """How a path fits a pattern.

    Args:
        numbers: what `{layer}` and `{expert}` stand for, by name.
        rest: what the last `*` stands for; empty where the pattern has none.
    """

    numbers: Mapping[str, int]
    rest: str


@dataclass(frozen=True)
class PathPattern:
    """A path of a checkpoint or of the module tree in which parts are open.

    Args:
        text: the path. `{layer}` and `{expert}` stand for a number, the same one wherever they repeat; `*`
            stands for any text, the empty one too.
    """

    text: str

    def match(self, path: str) -> PathMatch | None:
        """How the whole of ``path`` fits, or None."""
        found = _compiled(self.text).fullmatch(path)
        if found is None:
            return None
        groups = found.groupdict()
        rest = groups.pop("rest", None) or ""
        return PathMatch({name: int(number) for name, number in groups.items()}, rest)

    def matches(self, path: str) -> bool:
        """Whether the whole of ``path`` fits."""
        return _compiled(self.text).fullmatch(path) is not None

    def fill(self, numbers: Mapping[str, int], rest: str = "") -> str:
        """The path with these numbers, and ``rest`` in the place of the last `*`."""
        path = self.text
        for name, number in numbers.items():
            path = path.replace(f"{{{name}}}", str(number))
        head, star, tail = path.rpartition("*")
        return f"{head}{rest}{tail}" if star else path

    def in_layers(self, count: int) -> Iterator[dict[str, int]]:
        """The numbers to fill in for each of ``count`` layers; one empty mapping where no layer is named."""
        if "{layer}" not in self.text:
            yield {}
            return
        for i in range(count):
            yield {"layer": i}


@functools.lru_cache(4096)
def _compiled(text: str) -> re.Pattern[str]:
    parts: list[str] = []
    seen: set[str] = set()
    last = text.rfind("*")
    at = 0
    for found in re.finditer(r"\{(layer|expert)\}|\*", text):
        parts.append(re.escape(text[at : found.start()]))
        at = found.end()
        if found[0] == "*":
            parts.append("(?P<rest>.*)" if found.start() == last else ".*")
        elif found[1] in seen:
            parts.append(f"(?P={found[1]})")
        else:
            seen.add(found[1])
            # A number without leading zeros, so that a name and its numbers stand for each other.
            parts.append(rf"(?P<{found[1]}>0|[1-9]\d*)")
    return re.compile("".join(parts) + re.escape(text[at:]), re.DOTALL)
