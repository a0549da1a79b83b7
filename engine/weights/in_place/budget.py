"""How many experts of each layer a budget of memory holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from mlx_experts.registry.errors import SettingError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_of(size: str | int) -> int:
    """Bytes of a size such as ``4GB``, ``1.5GiB`` or a number.

    Raises:
        SettingError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise SettingError(
            "the expert memory is no size",
            expected="a number with B, kB, MB, GB, TB or KiB, MiB, GiB, TiB, such as 4GB",
            found=repr(size)[:80],
        )
    return int(Decimal(match[1]) * unit)


def words(size: int) -> str:
    """A size that is enough for as many bytes, in MB, as :func:`bytes_of` reads it."""
    return f"{-(-size // 1000) / 1000:.3f}MB" if size < 10**9 else f"{-(-size // 10**6) / 1000:.3f}GB"


@dataclass(frozen=True)
class LayerSize:
    """What a budget must know of one layer's experts.

    Args:
        layer: index of the decoder layer.
        experts: E.
        least: the experts of one token, which must be in memory together.
        bytes_each: bytes of one expert.
    """

    layer: int
    experts: int
    least: int
    bytes_each: int


@dataclass(frozen=True)
class MemoryPlan:
    """Slots of every layer under a budget.

    Args:
        budget: bytes.
        layers: in the order of the model.
        slots: experts of each that are in memory together; all of them where the layer stays whole.
    """

    budget: int
    layers: tuple[LayerSize, ...]
    slots: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(n * each.bytes_each for n, each in zip(self.slots, self.layers, strict=True))

    @property
    def least(self) -> int:
        """The smallest budget that runs."""
        return least_of(self.layers)

    @property
    def whole(self) -> int:
        """Bytes of all experts."""
        return sum(each.experts * each.bytes_each for each in self.layers)


def least_of(layers: Sequence[LayerSize]) -> int:
    """The smallest budget that runs: the experts of one token in every layer."""
    return sum(each.least * each.bytes_each for each in layers)


def plan_memory(layers: Sequence[LayerSize], budget: int) -> MemoryPlan:
    """As many slots for every layer as the budget holds, as evenly as can be.

    Raises:
        SettingError: the budget does not hold the experts of one token in every layer.
    """
    least = least_of(layers)
    if budget < least:
        raise SettingError(
            "the expert memory does not hold the experts of one token",
            expected=f"at least {words(least)}",
            found=words(budget),
            hint=f"ask for {words(least)} or more; more of it means fewer reads",
        )
    slots = [each.least for each in layers]
    rest = budget - least
    while True:
        growing = [i for i, each in enumerate(layers) if slots[i] < each.experts]
        # The layers with the fewest slots first, so that all grow together.
        lowest = min((slots[i] for i in growing), default=0)
        fit = [i for i in growing if slots[i] == lowest and layers[i].bytes_each <= rest]
        if not fit:
            break
        for i in fit:
            if layers[i].bytes_each <= rest:
                slots[i] += 1
                rest -= layers[i].bytes_each
    return MemoryPlan(budget, tuple(layers), tuple(slots))
