"""Headers of safetensors files: sound ones are read, every other kind of file is refused by name."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mlx_experts.registry.checkpoint.safetensors_header import DTYPE_BITS, Header, read_header
from mlx_experts.registry.errors import CheckpointError


def entry(
    dtype: str = "F32", shape: list[Any] | None = None, offsets: list[Any] | None = None
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": offsets or [0, 8]}


def write(path: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def refused(path: Path | str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in caught.value.where
    return caught.value


def test_a_file_of_the_safetensors_library_is_read_with_its_metadata(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = {
        "a": np.array(2, np.uint8),
        "b": np.full((2, 3), 7, np.float16),
        "none": np.zeros((0, 4), np.float32),
    }
    save_file(arrays, path, {"format": "mlx"})
    header = read_header(path)
    assert header.metadata == {"format": "mlx"}
    assert header.file_bytes == path.stat().st_size
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        "a": ("U8", ()),
        "b": ("F16", (2, 3)),
        "none": ("F32", (0, 4)),
    }
    info = header.tensors["b"]
    assert (info.size, info.nbytes, info.file) == (6, 12, str(path))
    assert path.read_bytes()[info.begin : info.end] == arrays["b"].tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format_is_known(dtype, tmp_path):
    nbytes = DTYPE_BITS[dtype]  # eight elements
    path = write(tmp_path / "x", {"a": entry(dtype, [8], [0, nbytes])}, b"\0" * nbytes)
    assert read_header(path).tensors["a"].nbytes == nbytes


def test_a_header_with_trailing_spaces_and_no_tensor_is_sound(tmp_path):
    assert read_header(write(tmp_path / "x", b"{}      ", b"")) == Header(str(tmp_path / "x"), {}, {}, 16)


def test_the_null_that_mlx_writes_for_no_metadata_is_none(tmp_path):
    assert read_header(write(tmp_path / "x", {"__metadata__": None, "a": entry()})).metadata == {}


def test_a_header_alone_is_read_only_when_asked(tmp_path):
    path = write(tmp_path / "x", {"a": entry("F32", [1000, 1000], [0, 4_000_000])}, b"")
    assert "cut short" in refused(path).what
    assert read_header(path, complete=False).tensors["a"].nbytes == 4_000_000


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs pointer"),
        (b"PK\x03\x04" + b"\0" * 30, "torch.save"),
        (b"\x80\x02}q\0(X\6\0\0\0weight", "pickle"),
        (b"\x80\x05\x95\x10\0\0\0\0\0\0\0", "pickle"),
        (b"\x93NUMPY\x01\0v\0{'descr'", "numpy"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"{}", "JSON"),
        (b"\0" * 4096, "zeros"),
    ],
)
def test_foreign_files_are_called_by_what_they_are(content, found, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert found in refused(path).found


def test_a_header_whose_length_spells_a_foreign_magic_is_still_read(tmp_path):
    raw = b"{}".ljust(int.from_bytes(b"\x80\x02", "little"))
    assert read_header(write(tmp_path / "x", raw, b"")).tensors == {}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"abc", "longer than its file"),
        (struct.pack("<Q", 2), "longer than its file"),
        (struct.pack("<Q", 2**63) + b"{}", "longer than its file"),
        (struct.pack("<Q", 3) + b"{}", "longer than its file"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"{x", "cannot be parsed"),
        (struct.pack("<Q", 3) + b"{\xff}", "not UTF-8"),
    ],
)
def test_files_that_are_no_safetensors_are_refused(content, what, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert what in refused(path).what


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ({"__metadata__": {"format": 1}}, "__metadata__"),
        ({"__metadata__": []}, "__metadata__"),
        ({"a": []}, "entry"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "entry"),
        ({"a": {**entry(), "extra": 1}}, "entry"),
        ({"a": entry("F31")}, "dtype"),
        ({"a": {**entry(), "dtype": ["F32"]}}, "dtype"),
        ({"a": {**entry(), "shape": 2}}, "shape cannot be"),
        ({"a": entry(shape=[-2])}, "shape cannot be"),
        ({"a": entry(shape=[2.0])}, "shape cannot be"),
        ({"a": entry(shape=[True, 2])}, "shape cannot be"),
        ({"a": entry(shape=[2**31])}, "shape cannot be"),
        ({"a": entry(shape=[10**400])}, "shape cannot be"),
        ({"a": entry(shape=[0, 2**64])}, "shape cannot be"),
        ({"a": entry(shape=[1] * 17)}, "shape cannot be"),
        ({"a": {**entry(), "data_offsets": [0]}}, "data_offsets"),
        ({"a": entry(offsets=[0, "8"])}, "data_offsets"),
        ({"a": entry(offsets=[-8, 0])}, "data_offsets"),
        ({"a": entry(offsets=[0, 2**64])}, "data_offsets"),
        ({"a": entry(offsets=[8, 0])}, "does not fit its shape"),
        ({"a": entry(shape=[3])}, "does not fit its shape"),
        ({"a": entry(shape=[2**30, 2**30, 2**30, 2**30])}, "does not fit its shape"),
        ({"a": entry("F4", [3], [0, 2])}, "does not fit its shape"),
        ({"a": entry("F32", [2**30], [0, 2**32])}, "cut short"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(), "b": entry("F32", [1], [4, 8])}, "overlap"),
        ({"a": entry(offsets=[8, 16])}, "hole"),
        ({"a": entry("F32", [1], [0, 4])}, "belong to no tensor"),
        ({}, "belong to no tensor"),
        ({"": entry()}, "name"),
        ({"../../x": entry()}, "name"),
        ({"a\nb": entry()}, "name"),
        ({"\ud800": entry()}, "name"),
        ({"a" * 513: entry()}, "name"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', "parsed"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}', "parsed"),
        (b'{"a":' + b"9" * 5000 + b"}", "parsed"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested"),
    ],
)
def test_a_header_that_lies_is_refused(header, what, tmp_path):
    assert what in refused(write(tmp_path / "model.safetensors", header)).what


def test_equal_entries_under_one_name_are_refused_too(tmp_path):
    one = b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    assert "twice" in refused(write(tmp_path / "x", b"{" + one + b"," + one + b"}")).found


def test_a_length_above_the_format_bound_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 200_000_000) + b"{")
        stream.truncate(300_000_000)
    tracemalloc.start()
    assert "too long" in refused(path).what
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_missing_files_folders_pipes_and_unreadable_files_are_refused(tmp_path):
    assert "missing" in refused(tmp_path / "absent.safetensors").what
    assert "folder" in refused(tmp_path).found
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in refused(tmp_path / "pipe").found
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read" in refused(loop).what


def test_a_truncated_file_says_how_much_is_missing(tmp_path):
    path = write(tmp_path / "x", {"a": entry("F32", [256], [0, 1024])}, b"\0" * 1000)
    error = refused(path)
    assert "24 bytes after the end" in error.found
    assert "again" in error.hint


def test_messages_are_one_screen_long_whatever_the_file_holds(tmp_path):
    path = write(tmp_path / "x", {"a": {**entry(), "shape": ["\x1b[31m" * 10_000]}})
    text = str(refused(path))
    assert len(text) < 1000 + len(str(path))
    assert "\x1b" not in text


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | JUNK,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JUNK,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JUNK,
    }
)


@given(header=st.dictionaries(st.sampled_from("abc") | st.text(max_size=3), ENTRY | JUNK, max_size=3))
@example(header={"a": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}})
def test_any_json_header_is_read_or_refused_and_what_is_read_the_library_reads_too(header, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("fuzz") / "x.safetensors", header, b"\0" * 3)
    try:
        mine = read_header(path).tensors
    except CheckpointError:
        return
    try:
        with safe_open(path, "np") as theirs:
            assert set(theirs.keys()) == set(mine)
    except SafetensorError:
        pytest.fail(f"read here, refused by the format's own library: {header}")


@given(start=st.binary(max_size=80), position=st.integers(0, 200), cut=st.integers(0, 250))
def test_random_bytes_anywhere_in_a_file_are_read_or_refused(start, position, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    sound = write(path, {"weight": entry("F16", [2, 2]), "other": entry("U8", [8], [8, 16])}, b"\0" * 16)
    content = bytearray(sound.read_bytes())
    content[position : position + len(start)] = start
    path.write_bytes(content[: len(content) - cut] if cut else content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = str(path)
        assert all(info.end <= header.file_bytes for info in header.tensors.values())
    assert str(path) in refusal


def test_reading_headers_imports_neither_mlx_nor_numpy_nor_safetensors():
    module = "mlx_experts.registry.checkpoint.safetensors_header"
    script = f"import sys, {module}; print({{'mlx', 'numpy', 'safetensors'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
