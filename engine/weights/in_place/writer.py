"""Writes tensors to safetensors files one by one, so that no more than one needs to be in memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import mlx.core as mx
import numpy as np

from mlx_experts.engine.weights.reader import SPELLED
from mlx_experts.registry.checkpoint.shard_index import INDEX_NAME
from mlx_experts.registry.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Shard:
    name: str
    tensors: list[str]


def write_tensors(
    folder: Path, tensors: dict[str, mx.array], *, most: int = SHARD_BYTES, progress: Progress | None = None
) -> None:
    """Write tensors and their index; each is computed when its turn comes and let go afterwards.

    Args:
        folder: an empty one.
        tensors: by name, in the order of writing; empty when all are written.
        most: bytes of one file, unless one tensor is larger.
        progress: called with (tensors written, tensors in all, name).

    Raises:
        CheckpointError: the disk is full, or cannot be written to; what was written stays in the folder.
    """
    total = sum(value.nbytes for value in tensors.values())
    free = shutil.disk_usage(folder).free
    if free < total:
        raise _not_written(folder, total, f"{free / 1e9:.2f} GB free")
    shards, count = _shards(tensors, most), len(tensors)
    done = 0
    try:
        for shard in shards:
            with (folder / shard.name).open("wb") as stream:
                stream.write(_header(shard, tensors))
                for name in shard.tensors:
                    _write(stream, tensors.pop(name))
                    done += 1
                    if progress is not None:
                        progress(done, count, name)
                stream.flush()
                os.fsync(stream.fileno())
        if len(shards) > 1:
            index = {name: shard.name for shard in shards for name in sorted(shard.tensors)}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (folder / INDEX_NAME).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_written(folder, total, error.strerror or str(error)) from None


def _not_written(folder: Path, total: int, found: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint cannot be written.",
        where=str(folder.parent),
        expected=f"room for {total / 1e9:.2f} GB",
        found=found,
        hint="Make room or choose another disk; nothing was left behind.",
    )


def _shards(tensors: Mapping[str, mx.array], most: int) -> list[_Shard]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, value in tensors.items():
        if groups[-1] and size + value.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += value.nbytes
    if len(groups) == 1:
        return [_Shard("model.safetensors", groups[0])]
    return [
        _Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", names) for i, names in enumerate(groups, 1)
    ]


def _header(shard: _Shard, tensors: Mapping[str, mx.array]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name in shard.tensors:
        value = tensors[name]
        entries[name] = {
            "dtype": SPELLED[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(stream: IO[bytes], value: mx.array) -> None:
    flat = mx.contiguous(value).reshape(-1)
    raw = flat.view(mx.uint8) if flat.size and flat.dtype != mx.bool_ else flat.astype(mx.uint8)
    mx.eval(raw)
    stream.write(memoryview(np.array(raw, copy=False)))  # type: ignore[arg-type]
