"""Rotary parameters of one layer, every number known."""

from dataclasses import dataclass
from typing import Any, Literal

from mlx_experts.registry.errors import ConfigError

FLOAT32_LARGEST = 3.4e38
# Anything smaller but zero is denormal there, and MLX takes it for zero.
FLOAT32_LEAST = 1.2e-38
ROPE_PLACE = "rope_parameters or rope_scaling in config.json, or `rope` in the family file"
"""Where the parameters of a rotation may come from."""


def _fits(value: float) -> bool:
    return FLOAT32_LEAST <= value <= FLOAT32_LARGEST


@dataclass(frozen=True)
class RopePlan:
    """Rotary parameters of one layer.

    Args:
        style: which pairs rotate together.
        theta: base of the frequencies.
        type: rope type, `default` for none.
        partial: rotated share of the head; `dims` overrides it.
        params: parameters of the rope type, as config.json names them.
        max_positions: longest context, or None.
    """

    style: Literal["half", "interleaved"]
    theta: float
    type: str
    partial: float
    dims: int | None
    params: dict[str, Any]
    max_positions: int | None

    def width(self, head_dim: int) -> int:
        """Rotated width of a head."""
        return self.dims if self.dims is not None else int(head_dim * self.partial)

    def number(self, name: str, default: float | None = None) -> float:
        """A parameter of the rope type that is a positive number.

        Args:
            default: what absence and 0 stand for; None where the type needs the parameter.

        Raises:
            ConfigError: it is no such number, or is needed and absent.
        """
        value = self.params.get(name)
        if not value and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and _fits(value):
            return float(value)
        raise ConfigError(
            f"rope type '{self.type}' needs a positive number '{name}'",
            where=ROPE_PLACE,
            found="none" if value is None else repr(value)[:80],
        )

    def numbers(self, name: str, count: int) -> list[float]:
        """A parameter of the rope type that is a list of ``count`` numbers.

        Raises:
            ConfigError: it is not.
        """
        value = self.params.get(name)
        found = repr(value)[:80]
        if isinstance(value, list):
            if len(value) == count and all(type(each) in (int, float) for each in value):
                return [float(each) for each in value]
            found = found if len(value) == count else f"{len(value)} entries"
        raise ConfigError(
            f"rope type '{self.type}' needs '{name}' with one number for each rotated pair",
            where=ROPE_PLACE,
            expected=f"{count} entries",
            found=found,
        )
