"""Finds the tensor files of a checkpoint and puts their headers together.

The index decides when there is one; without it every file of the set is read. Nothing is guessed: a shard
or a tensor that should be there and is not is an error before anything is loaded, and a file that is left
out is written down.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Protocol

from mlx_experts.registry.checkpoint.other_formats import other_format
from mlx_experts.registry.checkpoint.safetensors_header import Header, TensorInfo
from mlx_experts.registry.checkpoint.strict_json import kind_of, parse_object, short
from mlx_experts.registry.errors import CheckpointError, TensorError

INDEX_NAME = "model.safetensors.index.json"

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.npz", "*.h5", "*.msgpack")
_SHOWN = 3


class Source(Protocol):
    """Where the files of a checkpoint are."""

    def names(self) -> Collection[str]:
        """Names of the files at the top of the folder or repository."""

    def where(self, name: str) -> str:
        """The full address of a file, for messages and as ``TensorInfo.file``."""

    def read(self, name: str) -> bytes:
        """The bytes of a small file."""

    def headers(self, names: Sequence[str]) -> list[Header]:
        """The headers of tensor files, in the order of ``names``."""


@dataclass(frozen=True)
class Shards:
    """All tensors of a checkpoint.

    Args:
        files: addresses of the files that hold them.
        notices: what was left out or looks odd, one sentence each.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    files: tuple[str, ...]
    notices: tuple[str, ...]


def read_shards(source: Source) -> Shards:
    """Find and read the headers of every tensor file.

    Raises:
        CheckpointError: there is no tensor file, a shard is absent, the index is not sound, one tensor is in
            two files, or a header is refused.
        TensorError: the index names tensors that are in no shard.
    """
    names = source.names()
    read = _through_index if INDEX_NAME in names else _without_index
    shards = read(source, names)
    if not shards.tensors:
        raise CheckpointError("The checkpoint holds no tensor.", where=listed(shards.files))
    return shards


def listed(items: Iterable[str], shown: int = _SHOWN) -> str:
    """The first few items and the number of the others."""
    items = list(items)
    rest = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _through_index(source: Source, names: Collection[str]) -> Shards:
    where = source.where(INDEX_NAME)
    weight_map = _weight_map(source.read(INDEX_NAME), where)
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if name not in names]
    if absent:
        raise _absent(absent, len(files), where)
    tensors: dict[str, TensorInfo] = {}
    notices = []
    unlisted = []
    metadata: dict[str, str] = {}
    for name, header in zip(files, source.headers(files), strict=True):
        metadata = {**header.metadata, **metadata}
        for tensor, info in header.tensors.items():
            if weight_map.get(tensor, name) != name:
                notices.append(
                    f"{name} holds another copy of {tensor}; the index takes {weight_map[tensor]}'s."
                )
                continue
            if tensor not in weight_map:
                _add(tensors, info)
                unlisted.append(tensor)
            else:
                tensors[tensor] = info
    lost = [tensor for tensor in weight_map if tensor not in tensors]
    if lost:
        raise TensorError(
            "The index names tensors that its shards do not hold.",
            where=where,
            expected=listed(f"{tensor} in {weight_map[tensor]}" for tensor in lost),
            found="no such tensor in the shard's header",
            hint="The index and the shards are of different versions; download both again.",
        )
    if unlisted:
        notices.append(f"The index does not list {len(unlisted)} tensors of its shards: {listed(unlisted)}.")
    stale = sorted(name for name in names if name.endswith(".safetensors") and name not in files)
    if stale:
        notices.append(f"Ignored because the index does not name them: {listed(stale)}.")
    return Shards(tensors, metadata, tuple(map(source.where, files)), tuple(notices))


def _weight_map(raw: bytes, where: str) -> dict[str, str]:
    """The index's map from tensor to shard, with every shard a plain file name."""
    weight_map = parse_object(raw, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = "none" if weight_map is None else f"a {kind_of(weight_map)}: {short(weight_map)}"
        raise CheckpointError(
            "The index has no weight_map.",
            where=where,
            expected="an object that gives each tensor its file",
            found=found,
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                "The index names a file that cannot be a shard.",
                where=f"{where}: {short(tensor)}",
                expected="the name of a .safetensors file beside the index, without a folder",
                found=short(name),
                hint="Do not load this checkpoint if you do not trust its source.",
            )
    return weight_map


def _is_plain_name(name: str) -> bool:
    plain = name.isprintable() and not set(name) & set("/\\:") and not name.startswith(".")
    return plain and name.endswith(".safetensors")


def _without_index(source: Source, names: Collection[str]) -> Shards:
    files = [name for name in sorted(names) if fnmatchcase(name, "model*.safetensors")]
    files = files or [name for name in sorted(names) if fnmatchcase(name, "*.safetensors")]
    if not files:
        others = [name for name in sorted(names) if any(fnmatchcase(name, glob) for glob in _OTHER_WEIGHTS)]
        other = other_format(names)
        raise CheckpointError(
            "The checkpoint has no safetensors file." if other is None else f"This is {other.what}.",
            where=source.where(""),
            expected=f"{INDEX_NAME} or *.safetensors",
            found=listed(others),
            hint="Check that the download is complete." if other is None else other.hint,
        )
    _check_numbering(files, source.where(""))
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for header in source.headers(files):
        metadata = {**header.metadata, **metadata}
        for info in header.tensors.values():
            _add(tensors, info)
    return Shards(tensors, metadata, tuple(map(source.where, files)), ())


def _check_numbering(files: list[str], where: str) -> None:
    """Files that call themselves i of n must be n files, counted from 1 or from 0."""
    sets: dict[tuple[str, str], set[int]] = defaultdict(set)
    widths: dict[tuple[str, str], int] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        key = match["stem"], match["total"]
        sets[key].add(int(match["number"]))
        widths[key] = len(match["number"])
    for (stem, total), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        # The files name the total, so a huge one must not make a huge list.
        absent = (number for number in range(first, first + int(total)) if number not in numbers)
        shown = [
            f"{stem}-{number:0{widths[stem, total]}}-of-{total}.safetensors"
            for number in islice(absent, _SHOWN + 1)
        ]
        if shown:
            raise _absent(shown, int(total), where)


def _absent(absent: list[str], total: int, where: str) -> CheckpointError:
    return CheckpointError(
        "Shards of the checkpoint are absent.",
        where=where,
        expected=f"{total} files",
        found=f"no {listed(absent)}",
        hint="Download the absent files.",
    )


def _add(tensors: dict[str, TensorInfo], info: TensorInfo) -> None:
    other = tensors.setdefault(info.name, info)
    if other is not info:
        raise CheckpointError(
            "One tensor is in two files.",
            where=info.name,
            expected="one file that holds it",
            found=f"{other.file} and {info.file}",
            hint="Remove the files of the older download.",
        )
