"""Whether fused kernels may be used at all, and up to which expert width and how many rows.

Read once when a layer's path is decided, never while tokens are being made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

from mlx_experts.engine.kernels.request import Activations, Device
from mlx_experts.registry import settings
from mlx_experts.registry.errors import SettingError

SWITCH = settings.variable("fused")
WIDTH_BOUND = settings.variable("fused_max_dff")


@dataclass(frozen=True)
class Bounds:
    """Where the fused forms pay, for one storage of the weights on one device.

    Args:
        max_width: the widest expert (F) that may run fused, itself included; None for no bound.
        max_rows: the most token rows that may run fused; None for as many as the kernel takes.
        many_from: token rows from which the path for many rows is used; None for never.
    """

    max_width: int | None = None
    max_rows: int | None = 1
    many_from: int | None = None


# Above 4096 the gather path was faster where others measured it on Metal: on an M1 Ultra 2560 gains and 6400
# loses 6 %. Several rows and the path for many rows are left to the gather path where nothing was measured:
# `registry tune` finds out, and ``measured.json`` says what was found on some devices.
_DEFAULTS: dict[Device, Bounds] = {
    "metal": Bounds(max_width=4096),
    "cuda": Bounds(),
    "cpu": Bounds(max_rows=None),
}


def default_bounds(device: Device) -> Bounds:
    """The bounds of a device on which nothing was measured."""
    return _DEFAULTS[device]


@dataclass(frozen=True)
class Policy:
    """What the person who runs the model asked for.

    Args:
        enabled: whether fused kernels may run.
        max_width: the widest expert (F) that may run fused, itself included, whatever was measured; None
            leaves it to the bounds.
        switched_by: what set ``enabled``.
        bound_by: what set the bounds.
        measured: bounds by the name of a storage (``Projection.storage``).
        otherwise: the bounds of other storages.
        pieces: whether a token on a GPU may run as compiled pieces of a layer.
    """

    enabled: bool = True
    max_width: int | None = None
    switched_by: str = "default"
    bound_by: str = "default"
    measured: Mapping[str, Bounds] = field(default_factory=dict, hash=False)
    otherwise: Bounds = Bounds(max_rows=None)
    pieces: bool = False

    def bounds(self, storages: Iterable[str]) -> Bounds:
        """The narrowest bounds of some storages."""
        held = [self.measured.get(storage, self.otherwise) for storage in storages] or [self.otherwise]
        widths = [b.max_width for b in held if b.max_width is not None]
        starts = [b.many_from for b in held]
        return Bounds(
            max_width=self.max_width if self.max_width is not None else min(widths, default=None),
            max_rows=min((b.max_rows for b in held if b.max_rows is not None), default=None),
            many_from=None if None in starts else max(s for s in starts if s is not None),
        )


@dataclass(frozen=True)
class Tuned:
    """Bounds that were measured on a device.

    Args:
        bounds: by the name of a storage.
        source: who measured them.
    """

    bounds: Mapping[str, Bounds]
    source: str = "registry tune"


def activations(asked: str | None) -> Activations:
    """What the CPU's kernels multiply activations as.

    Args:
        asked: the argument of ``load``; None leaves the choice to the environment.

    Raises:
        SettingError: it is no such word, or a variable of the environment cannot be read.
    """
    chosen = settings.read().cpu_activations if asked is None else asked
    if chosen not in (None, *get_args(Activations)):
        raise SettingError(
            "no such activations",
            where="cpu_activations",
            expected=" or ".join(get_args(Activations)),
            found=repr(chosen)[:80],
        )
    return cast(Activations, chosen or "float32")


def resolve(device: Device, fused: bool | None = None, *, tuned: Tuned | None = None) -> Policy:
    """The policy for one device.

    Args:
        fused: the argument of ``load``; None leaves the choice to the environment.
        tuned: what was measured on this device, if anything was.

    Raises:
        SettingError: a variable of the environment cannot be read.
    """
    asked = settings.read()
    if fused is not None:
        enabled, switched_by = fused, f"fused={fused}"
    else:
        enabled, switched_by = asked.fused, "default" if asked.fused else f"{SWITCH} in the environment"
    measured, source = ({}, f"default for {device}") if tuned is None else (tuned.bounds, tuned.source)
    if asked.fused_max_dff is not None:
        source = WIDTH_BOUND
    pieces = enabled and (device == "cuda" if asked.pieces is None else asked.pieces)
    return Policy(enabled, asked.fused_max_dff, switched_by, source, measured, _DEFAULTS[device], pieces)
