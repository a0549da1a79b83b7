"""The audit of a load: every parameter filled, every tensor claimed, shapes and kinds of values equal."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_experts.registry.errors import TensorError

_SHOWN = 8


@dataclass
class Audit:
    """How a checkpoint's converted tensors and a model's parameters fit.

    Args:
        missing: parameters without a tensor.
        unclaimed: tensors that no rule claims.
        misshapen: tensors of another shape, with both shapes, one line a pattern.
        mistyped: tensors whose values are of another kind, with both dtypes, one line a pattern.
        faulty: names of the tensors of the last two.
    """

    missing: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)

    @property
    def clean(self) -> bool:
        """Whether everything fits."""
        return not (self.missing or self.unclaimed or self.faulty)

    def check(self, where: str = "", hint: str = "") -> None:
        """Refuse what does not fit.

        Args:
            where: what was audited.
            hint: what to do, where more is known than that the two do not belong together.

        Raises:
            TensorError: something is missing, unclaimed, of another shape or kind; collapsed by pattern.
        """
        if self.clean:
            return
        rows = {
            f"{len(self.missing)} parameters without a tensor": collapse(self.missing),
            f"{len(self.unclaimed)} tensors that no rule claims": collapse(self.unclaimed),
            "tensors of another shape": self.misshapen,
            "tensors of another dtype": self.mistyped,
        }
        raise TensorError(
            "the checkpoint and the model do not fit",
            where=where,
            found="\n".join(_listed(title, each) for title, each in rows.items() if each),
            hint=hint
            or "check that config.json belongs to these weights; `registry inspect` shows the whole table",
        )


def audit(parameters: Mapping[str, mx.array], tensors: Mapping[str, mx.array]) -> Audit:
    """Compare a model's parameters, as quantised as the tensors are, with the tensors for them.

    A float parameter takes any float; a packed or an integer one takes its own dtype, and an integer one that
    is not packed also another width of integers, which the caller casts.
    """
    result = Audit(
        missing=[name for name in parameters if name not in tensors],
        unclaimed=[name for name in tensors if name not in parameters],
    )
    shapes: dict[str, list[str]] = defaultdict(list)
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, value in tensors.items():
        wanted = parameters.get(name)
        if wanted is None:
            continue
        if wanted.shape != value.shape:
            shapes[f"expected {[*wanted.shape]}, found {[*value.shape]}"].append(name)
        elif not _takes(wanted.dtype, value.dtype):
            kinds[f"expected {_spelled(wanted.dtype)}, found {_spelled(value.dtype)}"].append(name)
        else:
            continue
        result.faulty.add(name)
    result.misshapen = [f"{name}: {what}" for what, names in shapes.items() for name in collapse(names)]
    result.mistyped = [f"{name}: {what}" for what, names in kinds.items() for name in collapse(names)]
    return result


def _takes(wanted: mx.Dtype, found: mx.Dtype) -> bool:
    if mx.issubdtype(wanted, mx.floating):
        return mx.issubdtype(found, mx.floating)
    if wanted in (mx.int32, mx.int64):
        return mx.issubdtype(found, mx.integer)
    return wanted == found


def _spelled(dtype: mx.Dtype) -> str:
    name = str(dtype).removeprefix("mlx.core.")
    return f"a float, as {name}" if mx.issubdtype(dtype, mx.floating) else name


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
