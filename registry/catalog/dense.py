"""Whether a model has experts at all, told by its config and its tensors' names; no family need know it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Sizes that a config states of experts. Dense siblings keep such keys with 0, 1 or null.
_COUNT = re.compile(r"experts?(_|$)|(^|_)moe(_|$)")
# What a mixture's tensors are called, in any spelling that the bundled families describe.
_TENSOR = re.compile(r"experts?\b|switch_mlp|block_sparse_moe|moe")


def signs_of_experts(config: Mapping[str, Any], tensors: Iterable[str] = ()) -> list[str]:
    """What says that a model has experts.

    Whoever wants to be sure that a model is dense asks for its tensors too: a config may use a key that
    nobody has used before.

    Args:
        config: a checkpoint's config.json.
        tensors: names of its tensors.

    Returns:
        Keys with their values, and the first tensor; nothing for a dense model.
    """
    found = list(dict.fromkeys(_keys(config)))
    name = next((name for name in tensors if _TENSOR.search(name.lower())), None)
    return found if name is None else [*found, name]


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _keys(value)
        elif _COUNT.search(key.lower()) and _counts(value):
            yield f"{key} {value}"


def _counts(value: Any) -> bool:
    """Whether a value can be a number of experts, or a width or a list of each, of a model that has some."""
    if isinstance(value, list):
        return any(_counts(each) for each in value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
