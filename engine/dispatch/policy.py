"""Whether fused kernels may be used at all, and up to which expert width.

Read once when a layer's path is decided, never while tokens are being made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_experts.engine.kernels.request import Device
from mlx_experts.registry.errors import SettingError

SWITCH = "MLX_EXPERTS_FUSED"
WIDTH_BOUND = "MLX_EXPERTS_FUSED_MAX_DFF"
_OFF = frozenset({"0", "false", "off", "no"})

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
    environ: Mapping[str, str] = os.environ,
) -> Policy:
    """The policy for one device.

    Args:
        fused: the argument of ``load``; None leaves the choice to the environment.
        tuned: what ``registry tune`` found on this device, if it was run.

    Raises:
        SettingError: the width bound in the environment is not a whole number of at least 0.
    """
    if fused is not None:
        enabled, switched_by = fused, f"fused={fused}"
    else:
        off = environ.get(SWITCH, "").strip().lower() in _OFF
        enabled, switched_by = not off, f"{SWITCH}={environ[SWITCH]}" if off else "default"
    text = environ.get(WIDTH_BOUND, "").strip()
    if text:
        return Policy(enabled, _width(text), switched_by, WIDTH_BOUND)
    if tuned is not None:
        return Policy(enabled, tuned.max_width, switched_by, "registry tune")
    return Policy(enabled, _DEFAULT_BOUND[device], switched_by, f"default for {device}")


def _width(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise SettingError(
            "The bound on the expert width cannot be read.",
            where=WIDTH_BOUND,
            expected="a whole number of at least 0",
            found=text,
            hint=f"Unset {WIDTH_BOUND}, or set it to the widest expert that may run fused.",
        )
    return int(text)
