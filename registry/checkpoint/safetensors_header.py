"""Reads the headers of safetensors files, and believes nothing that the file itself does not bear out.

Only the header is read, never the tensors, and nothing is allocated because a header claims it: every
length is first held against the size of the file. The rules are those of the format's own description
(https://github.com/huggingface/safetensors#format): an 8-byte little-endian length, a JSON object, then the
data, with the tensors' byte ranges covering the data without overlap or hole.
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_experts.registry.checkpoint.strict_json import kind_of, parse_object, short
from mlx_experts.registry.errors import CheckpointError

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element, by the format's spelling of the dtype."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound on a header."""

_PROBE_BYTES = 64
# MLX keeps a dimension in a signed 32-bit integer.
_MAX_DIMENSION = 2**31 - 1
_MAX_RANK = 16
_MAX_NAME = 512

_FOREIGN = (
    (b"GGUF", "a GGUF file", "Give the folder of the safetensors checkpoint that it was made from."),
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "Run `git lfs pull`."),
    (b"PK\x03\x04", "a zip archive (torch.save or numpy)", "Convert the checkpoint to safetensors."),
    (b"\x93NUMPY", "a numpy array", "Convert the checkpoint to safetensors."),
    (b"\x89HDF", "an HDF5 file", "Convert the checkpoint to safetensors."),
    (b"\x80\x02", "a Python pickle", "Convert the checkpoint to safetensors; a pickle is never opened here."),
    (b"\x80\x03", "a Python pickle", "Convert the checkpoint to safetensors; a pickle is never opened here."),
    (b"\x80\x04", "a Python pickle", "Convert the checkpoint to safetensors; a pickle is never opened here."),
    (b"\x80\x05", "a Python pickle", "Convert the checkpoint to safetensors; a pickle is never opened here."),
    (b"<", "a web page or an XML file", "The download saved an error page; download the file again."),
    (b"{", "JSON text without the 8-byte length in front", "Check that the file has the right name."),
    (b"\0" * LENGTH_BYTES, "zeros", "The download reserved the file and did not fill it; download it again."),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor.

    Args:
        dtype: the format's spelling, a key of ``DTYPE_BITS``.
        begin: offset of the first byte from the start of the file.
        end: offset after the last byte.
        file: path or hub address of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The header of one file.

    Args:
        metadata: the ``__metadata__`` entry, for example ``{"format": "mlx"}``.
        file_bytes: size of the file when it was read.
    """

    file: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def read_header(path: Path | str, *, complete: bool = True) -> Header:
    """Read and check the header of a safetensors file.

    Args:
        complete: demand the tensors' bytes too; without, a file may end right after its header.

    Raises:
        CheckpointError: the file is missing, unreadable, foreign, cut short, or its header is not sound.
    """
    path, file = Path(path), str(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            raise _refuse(file, "This is not a file.", "a safetensors file", kind)
        with path.open("rb") as stream:
            length = header_length(stream.read(_PROBE_BYTES), status.st_size, file)
            stream.seek(LENGTH_BYTES)
            raw = stream.read(length)
    except FileNotFoundError:
        raise _refuse(
            file, "A tensor file is missing.", hint="Download the file; it may have been removed meanwhile."
        ) from None
    except OSError as error:
        raise _refuse(file, "A tensor file cannot be read.", found=error.strerror or str(error)) from None
    return parse_header(raw, status.st_size, file, length=length, complete=complete)


def header_length(start: bytes, file_bytes: int, file: str) -> int:
    """The length of the header, from the first bytes of the file.

    Args:
        start: the first bytes of the file, at least 9 if it has as many.
        file_bytes: the size of the whole file.

    Raises:
        CheckpointError: the file is empty or foreign, or the length cannot be.
    """
    if file_bytes == 0 or not start:
        raise _refuse(
            file, "A tensor file is empty.", "a safetensors file", "0 bytes", "Download the file again."
        )
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    # The first byte of a header is always a brace, so a file that has one there is no other format.
    sound = file_bytes > LENGTH_BYTES and start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"
    if not sound:
        for magic, name, hint in _FOREIGN:
            if start.startswith(magic):
                raise _refuse(file, "This is not a safetensors file.", "a safetensors file", name, hint)
    if file_bytes < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES:
        raise _refuse(
            file,
            "The header is longer than its file.",
            f"at most {max(file_bytes - LENGTH_BYTES, 0)} bytes, the rest of the file",
            f"a length of {length}",
            "The file is foreign or cut short; download it again.",
        )
    if length > MAX_HEADER_BYTES:
        raise _refuse(
            file, "The header is too long.", f"at most {MAX_HEADER_BYTES} bytes", f"a length of {length}"
        )
    if not sound:
        raise _refuse(
            file,
            "This is not a safetensors file.",
            "a JSON object after the first 8 bytes",
            f"bytes {start[:16]!r}",
        )
    return length


@lru_cache(maxsize=1)
def parse_header(
    raw: bytes, file_bytes: int, file: str, *, length: int | None = None, complete: bool = True
) -> Header:
    """Check the JSON of a header against the size of its file.

    The last one is kept: a file's header is read again when its tensors are, and seldom is another then.

    Args:
        raw: the header, without the 8 bytes of length.
        file_bytes: the size of the whole file.
        length: the header's announced length; that of ``raw`` by default.
        complete: as in ``read_header``.

    Raises:
        CheckpointError: the header is not sound.
    """
    length = len(raw) if length is None else length
    if len(raw) != length:
        raise _refuse(file, "A tensor file shrank while it was read.", f"{length} bytes", f"{len(raw)} bytes")
    entries = parse_object(raw, file)
    metadata = _metadata(entries.pop("__metadata__", None), file)
    data_start = LENGTH_BYTES + length
    tensors = {name: _tensor(name, entry, data_start, file) for name, entry in entries.items()}
    _check_coverage(list(tensors.values()), data_start, file_bytes, file, complete)
    return Header(file, tensors, metadata, file_bytes)


def _metadata(entry: Any, file: str) -> dict[str, str]:
    # MLX writes null where there is none.
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _refuse(file, "The header's __metadata__ is wrong.", "an object of strings", short(entry))
    return entry


def _tensor(name: str, entry: Any, data_start: int, file: str) -> TensorInfo:
    """One entry of the header, its types and sizes checked on their own."""
    # Names are printed and matched, never used as paths; one that looks like a path has no honest use.
    if not name.isprintable() or not 0 < len(name) <= _MAX_NAME or "/" in name or "\\" in name:
        raise _refuse(file, "A tensor's name cannot be used.", "printable text without slashes", short(name))
    where = f"{file}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = f"the keys {short(sorted(entry))}" if isinstance(entry, dict) else f"a {kind_of(entry)}"
        raise _refuse(where, "A tensor's entry is wrong.", "dtype, shape and data_offsets", found)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _refuse(where, "A tensor's dtype is unknown.", ", ".join(DTYPE_BITS), short(dtype))
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_dimension, shape)):
        raise _refuse(
            where,
            "A tensor's shape cannot be.",
            f"at most {_MAX_RANK} whole numbers from 0 to {_MAX_DIMENSION}",
            short(shape),
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_offset, offsets)):
        raise _refuse(where, "A tensor's data_offsets are wrong.", "two whole numbers", short(offsets))
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise _refuse(
            where,
            "A tensor's byte range does not fit its shape.",
            f"{bits / 8:.15g} bytes for {dtype} {shape}",
            f"data_offsets {offsets}: {end - begin} bytes",
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end, file)


def _is_dimension(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_DIMENSION


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_coverage(
    tensors: list[TensorInfo], data_start: int, file_bytes: int, file: str, complete: bool
) -> None:
    """The byte ranges must follow each other and end where the file ends."""
    position, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise _refuse(
                f"{file}: {tensor.name}",
                "Tensors overlap." if tensor.begin < position else "There is a hole between tensors.",
                f"byte {position - data_start}, where {before} ends",
                f"byte {tensor.begin - data_start}",
                "The file was not written by a safetensors library; do not use it.",
            )
        position, before = tensor.end, tensor.name
    if not complete and file_bytes == data_start:
        return
    if position > file_bytes:
        raise _refuse(
            file,
            "A tensor file is cut short.",
            f"{position} bytes",
            f"{file_bytes} bytes; {before} ends {position - file_bytes} bytes after the end of the file",
            "Download the file again.",
        )
    if position < file_bytes:
        raise _refuse(
            file,
            "A tensor file holds bytes that belong to no tensor.",
            f"{position} bytes",
            f"{file_bytes} bytes",
            "The file was not written by a safetensors library; do not use it.",
        )


def _refuse(where: str, what: str, expected: str = "", found: str = "", hint: str = "") -> CheckpointError:
    return CheckpointError(what, where=where, expected=expected, found=found, hint=hint)
