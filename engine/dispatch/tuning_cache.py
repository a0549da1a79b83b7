"""This device's break-even width, measured by ``registry tune`` and kept between runs.

One JSON file holds an entry for each device, MLX version and text of the kernels, so that a change of any of
them makes the entry unused and never wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from platformdirs import user_cache_path

from mlx_experts.engine.dispatch.policy import TunedBound
from mlx_experts.engine.kernels.request import Device
from mlx_experts.registry import settings
from mlx_experts.registry.errors import SettingError

CACHE_DIR = settings.variable("cache_dir")


@dataclass(frozen=True)
class Timing:
    """Gather against fused at one expert width, in microseconds.

    Args:
        noise: half the interquartile range of the ratio's samples, relative to their median.
    """

    width: int
    gather_us: float
    fused_us: float
    noise: float

    @property
    def ratio(self) -> float:
        """How many times faster fused is."""
        return self.gather_us / self.fused_us

    @property
    def loses(self) -> bool:
        """Whether fused is slower by more than the noise."""
        return self.ratio < 1.0 - self.noise


def break_even(timings: Sequence[Timing]) -> TunedBound:
    """The widest measured expert below the first width at which fused loses."""
    widest = 0
    for timing in sorted(timings, key=lambda t: t.width):
        if timing.loses:
            return TunedBound(widest)
        widest = timing.width
    return TunedBound(None)


def cache_file() -> Path:
    """Where the entries are kept; ``MLX_EXPERTS_CACHE_DIR`` names another folder."""
    folder = settings.read().cache_dir
    return (folder or user_cache_path("mlx-experts", appauthor=False)) / "tune.json"


@lru_cache(maxsize=1)
def kernel_hash() -> str:
    """A digest of every file that a kernel is made from."""
    digest = hashlib.sha256()
    folder = files("mlx_experts.engine.kernels")
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_file() and not entry.name.startswith("."):
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes())
    return digest.hexdigest()[:16]


def entry_key(device: Device) -> str:
    """What an entry is filed under."""
    kind = mx.cpu if device == "cpu" else mx.gpu
    name = mx.device_info(kind)["device_name"]
    return f"{device} | {name} | mlx {version('mlx')} | kernels {kernel_hash()}"


def save(device: Device, timings: Sequence[Timing]) -> TunedBound:
    """Keep the outcome of a measurement, and return it."""
    bound_ = break_even(timings)
    path = cache_file()
    entries = dict(_entries(path))
    entries[entry_key(device)] = {
        "max_width": bound_.max_width,
        "timings": [asdict(t) for t in sorted(timings, key=lambda t: t.width)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved over: a reader never sees half a file.
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    beside.replace(path)
    return bound_


def bound(device: Device) -> TunedBound | None:
    """What was measured on this device with these kernels, or None.

    Raises:
        SettingError: the file is there and is not what ``save`` writes.
    """
    path = cache_file()
    if not path.is_file():
        return None
    entry = _entries(path).get(entry_key(device))
    if entry is None:
        return None
    width = entry.get("max_width") if isinstance(entry, dict) else entry
    if not (width is None or isinstance(width, int)) or not isinstance(entry, dict):
        raise _damaged(path, str(entry)[:80])
    return TunedBound(width)


def _entries(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(entries, dict):
        raise _damaged(path, type(entries).__name__)
    return entries


def _damaged(path: Path, found: str) -> SettingError:
    return SettingError(
        "The file of tuning results cannot be read.",
        where=str(path),
        expected="what `registry tune` writes",
        found=found,
        hint="Delete the file and run `registry tune` again.",
    )
