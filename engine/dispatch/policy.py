"""Whether fused kernels may be used at all, and up to which expert width.

Read once when a layer's path is decided, never while tokens are being made.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_experts.engine.kernels.request import Device
from mlx_experts.registry import settings

SWITCH = settings.variable("fused")
WIDTH_BOUND = settings.variable("fused_max_dff")

# Above these expert widths the gather path was faster where others measured it: on an M1 Ultra 2560 gains
# and 6400 loses 6 %. No Metal device has run this code; `registry tune` replaces the figure. On an H200 and
# on the CPU the fused form wins at every public width (docs/benchmarks.md).
_DEFAULT_BOUND: dict[Device, int | None] = {"metal": 4096, "cuda": None, "cpu": None}


@dataclass(frozen=True)
class Policy:
    """What the person who runs the model asked for.

    Args:
        enabled: whether fused kernels may run.
        max_width: the widest expert (F) that may run fused, itself included; None for no bound.
        switched_by: what set ``enabled``.
        bound_by: what set ``max_width``.
    """

    enabled: bool = True
    max_width: int | None = None
    switched_by: str = "default"
    bound_by: str = "default"


@dataclass(frozen=True)
class TunedBound:
    """The bound on F that ``registry tune`` found; None when the fused form never lost."""

    max_width: int | None


def resolve(
    device: Device,
    fused: bool | None = None,
    *,
    tuned: TunedBound | None = None,
) -> Policy:
    """The policy for one device.

    Args:
        fused: the argument of ``load``; None leaves the choice to the environment.
        tuned: what ``registry tune`` found on this device, if it was run.

    Raises:
        SettingError: a variable of the environment cannot be read.
    """
    asked = settings.read()
    if fused is not None:
        enabled, switched_by = fused, f"fused={fused}"
    else:
        enabled, switched_by = asked.fused, "default" if asked.fused else f"{SWITCH} in the environment"
    if asked.fused_max_dff is not None:
        return Policy(enabled, asked.fused_max_dff, switched_by, WIDTH_BOUND)
    if tuned is not None:
        return Policy(enabled, tuned.max_width, switched_by, "registry tune")
    return Policy(enabled, _DEFAULT_BOUND[device], switched_by, f"default for {device}")
