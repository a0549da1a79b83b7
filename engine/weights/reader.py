"""Reads a checkpoint's tensors into MLX arrays, shard by shard, and checks them against their headers.

How dtypes that MLX lacks come out, with the dtype on disk kept in ``checkpoint.tensors``:

    F8_E4M3, F8_E5M2, F8_E8M0   uint8 bytes
    F4                          uint8, two values a byte, the last axis half as long
    F64                         float32

The arrays are read when they are first needed, except in a file that holds F4, F8_E5M2 or F64, which MLX
does not open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.safetensors_header import Header, TensorInfo, read_header
from mlx_experts.registry.errors import CheckpointError

DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "C64": mx.complex64,
}
"""MLX's dtype by the name in a safetensors header, for those that MLX has itself."""
SPELLED = {dtype: name for name, dtype in DTYPES.items()}
"""The name in a header by MLX's dtype."""
_OWN_DTYPES = {"F4": mx.uint8, "F8_E5M2": mx.uint8, "F64": mx.float32}
# Eight-bit floats keep their bytes.
_KNOWN_DTYPES = {**DTYPES, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8, **_OWN_DTYPES}


def load_arrays(
    checkpoint: Checkpoint,
    progress: Callable[[int, int, str], None] | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, mx.array]:
    """Tensors of a checkpoint.

    Args:
        progress: called after each shard with (shards read, shards in all, file name).
        names: those that are wanted; None for all.

    Raises:
        CheckpointError: a file is gone or damaged, is not what its header said, or holds a dtype that has
            no form in MLX.
    """
    by_file: dict[str, list[TensorInfo]] = defaultdict(list)
    wanted = list(checkpoint.tensors if names is None else names)
    for name in wanted:
        by_file[checkpoint.tensors[name].file].append(checkpoint.tensors[name])
    arrays: dict[str, mx.array] = {}
    for number, file in enumerate(checkpoint.files, 1):
        arrays.update(_load_file(file, by_file[file]))
        if progress is not None:
            progress(number, len(checkpoint.files), Path(file).name)
    return {name: arrays[name] for name in wanted}


def placeholder(info: TensorInfo) -> mx.array:
    """A lazy array of the shape and dtype that ``load_arrays`` gives a tensor, never to be evaluated.

    Raises:
        CheckpointError: the dtype has no form in MLX.
    """
    return mx.zeros(array_shape(info), dtype=array_dtype(info))


def stored_dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    """Dtypes on disk, spelled as in safetensors."""
    return {name: info.dtype for name, info in checkpoint.tensors.items()}


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Where arrays of a checkpoint are evaluated: a failed read becomes an error that names the file.

    Raises:
        CheckpointError: a file was removed, cut short or replaced after its header was read.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("[read]"):
            raise
        for file in checkpoint.files:
            _check_unchanged(file, (info for info in checkpoint.tensors.values() if info.file == file))
        raise CheckpointError(
            "A tensor cannot be read.", where=checkpoint.where, found=str(error), hint="Try again."
        ) from None


def _load_file(file: str, infos: list[TensorInfo]) -> dict[str, mx.array]:
    wanted = {info.name: array_dtype(info) for info in infos}
    header = _check_unchanged(file, infos)
    if any(info.dtype in _OWN_DTYPES for info in header.tensors.values()):
        return _read_file(file, infos)
    try:
        loaded = mx.load(file)
    except RuntimeError as error:
        _check_unchanged(file, infos)
        raise CheckpointError("A tensor file cannot be read.", where=file, found=str(error)) from None
    assert isinstance(loaded, dict)
    for info in infos:
        array = loaded.get(info.name)
        if array is None or tuple(array.shape) != info.shape or array.dtype != wanted[info.name]:
            found = "no such tensor" if array is None else f"{array.dtype} {array.shape}"
            raise CheckpointError(
                "A tensor is not what its header says.",
                where=f"{file}: {info.name}",
                expected=f"{info.dtype} {[*info.shape]}",
                found=found,
            )
    return {info.name: loaded[info.name] for info in infos}


def _read_file(file: str, infos: list[TensorInfo]) -> dict[str, mx.array]:
    """The tensors of a file with a dtype that ``mx.load`` refuses."""
    arrays = {}
    try:
        with open(file, "rb") as stream:
            for info in infos:
                stream.seek(info.begin)
                raw = stream.read(info.nbytes)
                if len(raw) != info.nbytes:
                    raise _changed(file)
                arrays[info.name] = _array(raw, info)
    except OSError as error:
        raise CheckpointError(
            "A tensor file cannot be read.", where=file, found=error.strerror or str(error)
        ) from None
    return arrays


def _array(raw: bytes, info: TensorInfo) -> mx.array:
    if info.dtype == "F64":
        # A value beyond float32 becomes infinite, as in any cast.
        with np.errstate(over="ignore"):
            return mx.array(np.frombuffer(raw, np.float64).reshape(info.shape).astype(np.float32))
    shape = array_shape(info)
    return mx.array(np.frombuffer(raw, np.uint8)).view(array_dtype(info)).reshape(shape)


def array_dtype(info: TensorInfo) -> mx.Dtype:
    """The dtype that ``load_arrays`` gives a tensor.

    Raises:
        CheckpointError: it has no form in MLX.
    """
    if info.dtype not in _KNOWN_DTYPES:
        raise CheckpointError(
            "A tensor's dtype has no form in MLX.",
            where=f"{info.file}: {info.name}",
            expected=", ".join(_KNOWN_DTYPES),
            found=info.dtype,
        )
    return _KNOWN_DTYPES[info.dtype]


def array_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape that ``load_arrays`` gives a tensor.

    Raises:
        CheckpointError: two values of four bits a byte end inside a byte.
    """
    if info.dtype != "F4":
        return info.shape
    if not info.shape or info.shape[-1] % 2:
        raise CheckpointError(
            "A row of half bytes ends inside a byte.",
            where=f"{info.file}: {info.name}",
            found=str([*info.shape]),
        )
    return (*info.shape[:-1], info.shape[-1] // 2)


def _check_unchanged(file: str, infos: Iterable[TensorInfo]) -> Header:
    """The header of a file, which must still be what it was when the checkpoint was opened."""
    header = read_header(file)
    if any(header.tensors.get(info.name) != info for info in infos):
        raise _changed(file)
    return header


def _changed(file: str) -> CheckpointError:
    return CheckpointError(
        "A tensor file changed while it was read.",
        where=file,
        hint="Wait until the download ends, then try again.",
    )
