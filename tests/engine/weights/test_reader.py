"""Tensors of real files in MLX: dtypes that it has and lacks, progress, and files that change meanwhile."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.weights.reader import load_arrays, reading, stored_dtypes
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.safetensors_header import DTYPE_BITS
from mlx_experts.registry.errors import CheckpointError

Tensors = dict[str, tuple[str, list[int], bytes]]


def write(path: Path, tensors: Tensors) -> Path:
    """A safetensors file of raw bytes, in any dtype that the format has."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def checkpoint(folder: Path, *files: Tensors) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    for number, tensors in enumerate(files, 1):
        write(folder / f"model-{number:05}-of-{len(files):05}.safetensors", tensors)
    return Checkpoint.open(folder)


def floats(*shape: int) -> tuple[str, list[int], bytes]:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32)
    return "F32", list(shape), values.tobytes()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("F32", np.float32),
        ("F16", np.float16),
        ("U8", np.uint8),
        ("I8", np.int8),
        ("I16", np.int16),
        ("U16", np.uint16),
        ("I32", np.int32),
        ("U32", np.uint32),
        ("I64", np.int64),
        ("U64", np.uint64),
        ("BOOL", np.bool_),
        ("C64", np.complex64),
    ],
)
@pytest.mark.parametrize("beside_e5m2", [False, True])
def test_dtypes_that_mlx_has_are_read_as_they_are(dtype, expected, beside_e5m2, tmp_path):
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(expected)
    tensors: Tensors = {"a": (dtype, [2, 3], values.tobytes()), "one": (dtype, [], values[:1, :1].tobytes())}
    tensors["none"] = (dtype, [0, 3], b"")
    if beside_e5m2:
        tensors["b"] = ("F8_E5M2", [4], b"\1\2\3\4")
    opened = checkpoint(tmp_path, tensors)
    arrays = load_arrays(opened)
    assert list(arrays) == list(opened.tensors)
    np.testing.assert_array_equal(np.array(arrays["a"]), values)
    assert arrays["one"].shape == ()
    assert arrays["none"].shape == (0, 3)
    assert stored_dtypes(opened)["a"] == dtype


@pytest.mark.parametrize("beside", ["F32", "F64"])
def test_bfloat16_keeps_its_bits_whichever_reader_is_used(beside, tmp_path):
    raw = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)
    size = 8 if beside == "F64" else 4
    tensors: Tensors = {"a": ("BF16", [3], raw.tobytes()), "b": (beside, [1], b"\0" * size)}
    array = load_arrays(checkpoint(tmp_path, tensors))["a"]
    assert array.dtype == mx.bfloat16
    assert array.tolist() == [1, -2, float("inf")]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_eight_bit_floats_come_as_bytes_and_keep_their_name(dtype, tmp_path):
    opened = checkpoint(tmp_path, {"a": (dtype, [2, 2], b"\x38\x3c\x40\xff")})
    array = load_arrays(opened)["a"]
    assert array.dtype == mx.uint8
    assert array.tolist() == [[0x38, 0x3C], [0x40, 0xFF]]
    assert stored_dtypes(opened) == {"a": dtype}


def test_four_bit_floats_come_two_in_a_byte(tmp_path):
    opened = checkpoint(tmp_path, {"a": ("F4", [2, 4], b"\1\2\3\4")})
    assert load_arrays(opened)["a"].tolist() == [[1, 2], [3, 4]]
    assert stored_dtypes(opened) == {"a": "F4"}
    with pytest.raises(CheckpointError, match="inside a byte"):
        load_arrays(checkpoint(tmp_path, {"a": ("F4", [2, 3], b"\1\2\3")}))


def test_doubles_are_rounded_to_float32(tmp_path):
    values = np.array([0.1, 1e300, -2.5])
    array = load_arrays(checkpoint(tmp_path, {"a": ("F64", [3], values.tobytes())}))["a"]
    assert array.dtype == mx.float32
    assert array.tolist() == [np.float32(0.1), float("inf"), -2.5]


def test_each_dtype_of_the_format_is_read_or_refused_by_name(tmp_path):
    refused = []
    for dtype, bits in DTYPE_BITS.items():
        opened = checkpoint(tmp_path, {"a": (dtype, [8], b"\0" * bits)})
        try:
            load_arrays(opened)
        except CheckpointError as error:
            refused.append(error.found)
    assert refused == ["F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]


def test_progress_is_told_shard_by_shard(tmp_path):
    opened = checkpoint(tmp_path, {"a": floats(2)}, {"b": floats(2)})
    calls: list[tuple[int, int, str]] = []
    load_arrays(opened, lambda *call: calls.append(call))
    assert calls == [(1, 2, "model-00001-of-00002.safetensors"), (2, 2, "model-00002-of-00002.safetensors")]


def test_the_copy_that_the_index_names_is_the_one_read(tmp_path):
    weight_map = {"a": "model-2.safetensors", "b": "model-1.safetensors"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write(tmp_path / "model-1.safetensors", {"a": floats(1), "b": floats(2)})
    write(tmp_path / "model-2.safetensors", {"a": ("F32", [1], struct.pack("<f", 9))})
    assert load_arrays(Checkpoint.open(tmp_path))["a"].tolist() == [9]


@pytest.mark.parametrize("dtype", ["F32", "F64"])
@pytest.mark.parametrize("change", ["remove", "cut", "replace"])
def test_a_shard_that_changes_before_it_is_loaded_is_named(change, dtype, tmp_path):
    size = 4 if dtype == "F32" else 8
    opened = checkpoint(tmp_path, {"a": floats(2)}, {"b": (dtype, [64], b"\1" * 64 * size)})
    path = Path(opened.files[1])
    if change == "remove":
        path.unlink()
    elif change == "cut":
        os.truncate(path, path.stat().st_size - 10)
    else:
        write(path, {"b": (dtype, [32, 2], b"\1" * 64 * size)})
    with pytest.raises(CheckpointError) as caught:
        load_arrays(opened)
    assert str(path) in caught.value.where


def test_a_shard_that_is_cut_after_it_was_opened_is_named_when_it_is_read(tmp_path):
    opened = checkpoint(tmp_path, {"a": floats(2)}, {"b": floats(1 << 16)})
    arrays = load_arrays(opened)
    os.truncate(opened.files[1], 1000)
    with pytest.raises(CheckpointError, match="cut short") as caught, reading(opened):
        mx.eval(arrays)
    assert caught.value.where == opened.files[1]
    checkpoint(tmp_path, {"a": floats(2)}, {"b": floats(1 << 16)})
    with reading(opened):
        mx.eval(load_arrays(opened))


def test_other_failures_while_reading_are_left_as_they_are(tmp_path):
    opened = checkpoint(tmp_path, {"a": floats(2)})
    with pytest.raises(RuntimeError, match="ours"), reading(opened):
        raise RuntimeError("ours")
