"""Arrays as they lie in files: an offset, a shape and strides, and how they are read.

What a checkpoint's conversion does to an expert's tensors is mostly a matter of looking: halves, every second
row, another order of axes. Such a view is read from the file itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.lib.stride_tricks import as_strided

from mlx_experts.registry.errors import CheckpointError

# NumPy has no bfloat16; its bits are carried as 16-bit integers.
_NUMPY = {
    mx.bool_: np.uint8,
    mx.uint8: np.uint8,
    mx.int8: np.int8,
    mx.uint16: np.uint16,
    mx.int16: np.int16,
    mx.uint32: np.uint32,
    mx.int32: np.int32,
    mx.uint64: np.uint64,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.float32: np.float32,
}
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def numpy_type(dtype: mx.Dtype) -> np.dtype:
    """The NumPy type that carries a dtype's bits."""
    return np.dtype(_NUMPY[dtype])


@dataclass(frozen=True, slots=True)
class FileView:
    """An array inside a file.

    Args:
        file: path of the file.
        begin: byte of the first element.
        shape, strides: as NumPy has them; strides in bytes.
        stored: dtype of the elements in the file.
        dtype: dtype that they are read as; the same, or another float.
    """

    file: str
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: mx.Dtype
    dtype: mx.Dtype

    @classmethod
    def whole(cls, file: str, begin: int, shape: Sequence[int], dtype: mx.Dtype) -> FileView:
        """A tensor that lies without gaps."""
        dense = _dense(shape, dtype.size)
        return cls(file, begin, tuple(shape), dense, dtype, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the array as it is read."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size

    @property
    def as_stored(self) -> bool:
        """Whether the file holds the very bytes that are read, in order."""
        return self.stored == self.dtype and self.strides == _dense(self.shape, self.stored.size)

    @property
    def span(self) -> int:
        """Bytes of the file from the first element to the last."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return reach + self.stored.size

    def at(self, index: int) -> FileView:
        """One entry of the first axis."""
        return replace(
            self, begin=self.begin + index * self.strides[0], shape=self.shape[1:], strides=self.strides[1:]
        )

    def slice(self, start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> FileView:
        """Elements from ``start`` to ``stop`` by positive steps, for each axis."""
        begin = self.begin + sum(a * s for a, s in zip(start, self.strides, strict=True))
        shape = tuple(max(0, -(-(b - a) // c)) for a, b, c in zip(start, stop, step, strict=True))
        strides = tuple(s * c for s, c in zip(self.strides, step, strict=True))
        return replace(self, begin=begin, shape=shape, strides=strides)

    def transpose(self, axes: Sequence[int]) -> FileView:
        """The axes in another order."""
        return replace(
            self, shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes)
        )

    def reshape(self, shape: Sequence[int]) -> FileView | None:
        """The same elements in the same order under another shape, or None where that is no view."""
        # Addresses alone: nothing is looked up at them.
        nowhere = as_strided(np.empty(0, numpy_type(self.stored)), self.shape, self.strides, writeable=False)
        try:
            shaped = np.reshape(nowhere, tuple(shape), copy=False)
        except ValueError:
            return None
        return replace(self, shape=shaped.shape, strides=shaped.strides)

    def view(self, dtype: mx.Dtype) -> FileView | None:
        """The bytes of the last axis read as another dtype, or None where they are no view."""
        size = self.stored.size
        if self.stored != self.dtype or not self.shape:
            return None
        if dtype.size == size:
            return replace(self, stored=dtype, dtype=dtype)
        width = self.shape[-1] * size
        if self.strides[-1] != size or width % dtype.size:
            return None
        return replace(
            self,
            shape=(*self.shape[:-1], width // dtype.size),
            strides=(*self.strides[:-1], dtype.size),
            stored=dtype,
            dtype=dtype,
        )

    def astype(self, dtype: mx.Dtype) -> FileView | None:
        """Read as another float, or None for what is none."""
        if dtype == self.dtype:
            return self
        # Two casts in a row may round twice; only widening may come before another.
        if self.dtype not in _FLOATS or dtype not in _FLOATS or self.dtype not in (self.stored, mx.float32):
            return None
        return replace(self, dtype=dtype)

    def read(self, descriptor: int, out: np.ndarray) -> None:
        """Read into ``out``, bytes without gaps.

        Raises:
            CheckpointError: the file ends before the array does, or cannot be read.
        """
        if self.as_stored:
            _fill(self.file, descriptor, self.begin, out)
            return
        raw = np.empty(self.span, np.uint8)
        _fill(self.file, descriptor, self.begin, raw)
        found = as_strided(
            np.ndarray((1,), numpy_type(self.stored), raw.data), self.shape, self.strides, writeable=False
        )
        out.view(numpy_type(self.dtype)).reshape(self.shape)[...] = _cast(found, self.stored, self.dtype)


def _dense(shape: Sequence[int], size: int) -> tuple[int, ...]:
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return tuple(reversed(strides))


def _fill(file: str, descriptor: int, begin: int, out: np.ndarray) -> None:
    rest = memoryview(out).cast("B")  # type: ignore[arg-type]
    while rest:
        try:
            count = os.preadv(descriptor, [rest], begin)
        except OSError as error:
            raise CheckpointError(
                "The experts' file cannot be read.", where=file, found=error.strerror or str(error)
            ) from None
        if not count:
            raise changed(file)
        begin, rest = begin + count, rest[count:]


def changed(file: str) -> CheckpointError:
    """The error for a file that is not what it was when the model was loaded."""
    return CheckpointError(
        "A tensor file changed while its experts were in use.",
        where=file,
        hint="Load the model again, and leave its files alone while it runs.",
    )


def _cast(values: np.ndarray, stored: mx.Dtype, dtype: mx.Dtype) -> np.ndarray:
    """Floats as another dtype, rounded to the nearest, ties to even, as MLX rounds."""
    if stored == dtype:
        return values
    wide = values.astype(np.float32)
    if stored == mx.bfloat16:
        wide = (values.astype(np.uint32) << 16).view(np.float32)
    if dtype != mx.bfloat16:
        with np.errstate(over="ignore"):
            return wide.astype(numpy_type(dtype))
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded).astype(np.uint16)
