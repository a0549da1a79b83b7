"""Where the fused forms pay on this device, by storage: measured by ``registry tune``, or shipped.

One JSON file holds an entry for each device, MLX version and text of the kernels, so that a change of any of
them makes the entry unused and never wrong. Without an entry, ``measured.json`` beside this module says what
was measured on devices of the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from platformdirs import user_cache_path
from pydantic import TypeAdapter, ValidationError

from mlx_experts.engine.dispatch.policy import Bounds, Tuned, default_bounds
from mlx_experts.engine.kernels.request import Device
from mlx_experts.registry import settings
from mlx_experts.registry.errors import SettingError

CACHE_DIR = settings.variable("cache_dir")
_WRITTEN = TypeAdapter(Bounds)


@dataclass(frozen=True)
class Timing:
    """Gather against another path at one expert width, in microseconds.

    Args:
        path: ``fused``, or ``many`` for the path for many rows.
        storage: how the weights are stored, as ``Projection.storage`` says.
        noise: half the interquartile range of the ratio's samples, relative to their median.
    """

    width: int
    gather_us: float
    fused_us: float
    noise: float
    storage: str = "affine 4-bit g64"
    rows: int = 1
    path: Literal["fused", "many"] = "fused"

    @property
    def ratio(self) -> float:
        """How many times faster the path is."""
        return self.gather_us / self.fused_us

    @property
    def loses(self) -> bool:
        """Whether the path is slower by more than the noise."""
        return self.ratio < 1.0 - self.noise


def break_even(timings: Sequence[Timing], otherwise: Bounds = Bounds()) -> dict[str, Bounds]:
    """The bounds of every storage that was timed.

    Args:
        otherwise: for what was not timed.
    """
    found = {}
    for storage in dict.fromkeys(t.storage for t in timings):
        its = [t for t in timings if t.storage == storage]
        one = sorted((t for t in its if t.path == "fused" and t.rows == 1), key=lambda t: t.width)
        several = sorted((t for t in its if t.path == "fused" and t.rows > 1), key=lambda t: t.rows)
        many = sorted((t for t in its if t.path == "many"), key=lambda t: t.rows)
        found[storage] = Bounds(
            max_width=_widest(one),
            max_rows=_most_rows(several) if several else otherwise.max_rows,
            many_from=_many_from(many) if many else otherwise.many_from,
        )
    return found


def _widest(timings: Sequence[Timing]) -> int | None:
    """The widest measured expert below the first width at which fused loses."""
    widest = 0
    for timing in timings:
        if timing.loses:
            return widest
        widest = timing.width
    return None


def _most_rows(timings: Sequence[Timing]) -> int | None:
    """The most rows below the first number at which fused loses; None where it never does."""
    most = 1
    for timing in timings:
        if timing.loses:
            return most
        most = timing.rows
    return None


def _many_from(timings: Sequence[Timing]) -> int | None:
    """The fewest rows from which the path for many never loses: where their bucket of the trace begins."""
    start = None
    for timing in reversed(timings):
        if timing.loses:
            break
        start = timing.rows
    return None if start is None else max(2, (1 << (start - 1).bit_length()) // 2 + 1)


def cache_file() -> Path:
    """Where the entries are kept; ``MLX_EXPERTS_CACHE_DIR`` names another folder."""
    folder = settings.read().cache_dir
    return (folder or user_cache_path("mlx-experts", appauthor=False)) / "tune.json"


@lru_cache(maxsize=1)
def kernel_hash() -> str:
    """A digest of every file that a kernel is made from."""
    digest = hashlib.sha256()
    for name, content in sorted(_kernel_files(files("mlx_experts.engine.kernels"), "")):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:16]


def _kernel_files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _kernel_files(entry, name)
        elif entry.is_file() and not entry.name.startswith("."):
            yield name, entry.read_bytes()


def device_name(device: Device) -> str:
    """The device as MLX names it."""
    kind = mx.cpu if device == "cpu" else mx.gpu
    return str(mx.device_info(kind).get("device_name", "unknown"))


def entry_key(device: Device) -> str:
    """What an entry is filed under."""
    return f"{device} | {device_name(device)} | mlx {version('mlx')} | kernels {kernel_hash()}"


def save(device: Device, timings: Sequence[Timing]) -> dict[str, Bounds]:
    """Keep the outcome of a measurement, and return it."""
    found = break_even(timings, default_bounds(device))
    path = cache_file()
    entries = dict(_entries(path))
    entries[entry_key(device)] = {
        "bounds": {storage: asdict(bounds) for storage, bounds in found.items()},
        "timings": [asdict(t) for t in sorted(timings, key=lambda t: (t.storage, t.path, t.rows, t.width))],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved over: a reader never sees half a file.
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    beside.replace(path)
    return found


def bound(device: Device) -> Tuned | None:
    """What was measured on this device with these kernels, else on devices of its name, or None.

    Raises:
        SettingError: the file is there and is not what ``save`` writes.
    """
    path = cache_file()
    if path.is_file() and (entry := _entries(path).get(entry_key(device))) is not None:
        return Tuned(_bounds(entry, path))
    shipped = _shipped().get(device_name(device))
    return None if shipped is None else Tuned(shipped, f"what was measured on {device_name(device)}")


@lru_cache(maxsize=1)
def _shipped() -> dict[str, dict[str, Bounds]]:
    text = files(__package__).joinpath("measured.json").read_text(encoding="utf-8")
    return {
        name: {storage: Bounds(**b) for storage, b in entry["bounds"].items()}
        for name, entry in json.loads(text).items()
    }


def _bounds(entry: Any, path: Path) -> dict[str, Bounds]:
    try:
        return {storage: _WRITTEN.validate_python(b) for storage, b in entry["bounds"].items()}
    except (TypeError, KeyError, AttributeError, ValidationError) as error:
        raise _damaged(path, str(entry)[:80]) from error


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
