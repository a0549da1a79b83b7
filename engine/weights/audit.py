"""The account of a load: every parameter filled, every tensor claimed, shapes equal, or one clear error."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import mlx.core as mx

from mlx_experts.registry.errors import TensorError

_SHOWN = 8


def collapse(names: Iterable[str], what: str = "tensors") -> list[str]:
    """Names collapsed by pattern: numbers become `{n}`, with how many of ``what`` each pattern stands for."""
    counts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        counts[re.sub(r"(?<=\.)\d+(?=\.|$)", "{n}", name)].append(name)
    return [
        f"{pattern} ({len(members)} {what})" if len(members) > 1 else members[0]
        for pattern, members in sorted(counts.items())
    ]


def _listed(title: str, rows: list[str]) -> str:
    more = f"\n  and {len(rows) - _SHOWN} more patterns" if len(rows) > _SHOWN else ""
    return f"{title}:\n  " + "\n  ".join(rows[:_SHOWN]) + more


def check_account(wanted: Mapping[str, tuple[int, ...]], got: Mapping[str, mx.array], where: str) -> None:
    """Compare the model's parameters with the carried tensors.

    Raises:
        TensorError: something is missing, unclaimed or of another shape; collapsed by pattern.
    """
    missing = [name for name in wanted if name not in got]
    unclaimed = [name for name in got if name not in wanted]
    misshapen = [
        f"{name}: expected {list(wanted[name])}, found {list(value.shape)}"
        for name, value in got.items()
        if name in wanted and tuple(value.shape) != tuple(wanted[name])
    ]
    if not missing and not unclaimed and not misshapen:
        return
    parts = []
    if missing:
        parts.append(_listed(f"{len(missing)} parameters without a tensor", collapse(missing)))
    if unclaimed:
        parts.append(_listed(f"{len(unclaimed)} tensors that no rule claims", collapse(unclaimed)))
    if misshapen:
        parts.append(_listed(f"{len(misshapen)} tensors of another shape", misshapen))
    raise TensorError(
        "the checkpoint and the model do not fit",
        where=where,
        found="\n".join(parts),
        hint="check that config.json belongs to these weights; `registry inspect` shows the whole table",
    )
