"""Steps of `checkpoint.conversions` in short: several paths in one step, and what their paths begin with.

A step's key holds one path, with `to` beside it where the step gives another name. It may hold a mapping of
several paths to their names instead (`rename: {a: b, c: d}`) or, where a step keeps the name, a list of them
(`conv: [a, b]`). Each path is then a step of its own, in the order written; what else the step states holds
for each. `in` is what every path of a step begins with: `{in: .mlp, rename: w1, to: gate_proj}` renames
`.mlp.w1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx_experts.registry.catalog.yaml_reader import KeyPath, Lines, renumbered

STEPS = ("checkpoint", "conversions")
"""Where the steps stand."""
INSIDE = "in"
"""The key of what every path of a step begins with."""
RENAMING = ("rename", "split", "conv", "pick")
"""Keys of steps that may hold a mapping of paths to their names."""
KEEPING = ("conv", "reshape")
"""Keys of steps that may hold a list of paths."""


def one_by_one(steps: list[Any], lines: Lines) -> list[Any]:
    """Steps with one whole path each.

    Args:
        lines: where each key stands; what is said of the steps is moved to their new numbers.
    """
    made = [each for i, step in enumerate(steps) for each in _singles(step, (*STEPS, i))]
    single = [step for step, _ in made]
    if single != steps:
        renumbered(lines, STEPS, [places for _, places in made])
    return single


def _singles(step: Any, at: KeyPath) -> Iterator[tuple[Any, dict[KeyPath, KeyPath]]]:
    """The steps that a step stands for, and for the keys of each what they are in the file."""
    verb = next((v for v in (*RENAMING, *KEEPING) if v in step), None) if isinstance(step, dict) else None
    if verb is None:
        yield step, {(): at}
        return
    held = step[verb]
    here: dict[KeyPath, KeyPath] = {(key,): (*at, key) for key in step if key != verb}
    itself: tuple[KeyPath, ...] = ((), (verb,))
    if isinstance(held, dict) and held and verb in RENAMING and "to" not in step:
        for path, name in held.items():
            place = (*at, verb, path)
            places = here | dict.fromkeys((*itself, ("to",)), place)
            yield _whole({**step, verb: path, "to": name}, verb), places
    elif isinstance(held, list) and held and verb in KEEPING and "to" not in step:
        for n, path in enumerate(held):
            yield _whole({**step, verb: path}, verb), here | dict.fromkeys(itself, (*at, verb, n))
    else:
        yield _whole(step, verb), {(): at}


def _whole(step: dict[str, Any], verb: str) -> dict[str, Any]:
    """The step with its paths written out, what they begin with included."""
    inside = step.get(INSIDE)
    if not isinstance(inside, str):
        return step

    def whole(path: Any) -> Any:
        if isinstance(path, list):
            return [whole(each) for each in path]
        return f"{inside}.{path}" if isinstance(path, str) else path

    return {key: whole(v) if key in (verb, "to") else v for key, v in step.items() if key != INSIDE}
