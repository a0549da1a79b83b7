"""What a view reads from a file is what MLX computes of the tensor; what is no view is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.memory.views import FileView, numpy_type
from mlx_experts.engine.weights.in_place.budget import LayerSize, bytes_of, plan_memory, words
from mlx_experts.engine.weights.in_place.trace import NotInPlace, Parts, _follow
from mlx_experts.registry.errors import CheckpointError, SettingError

VALUES = mx.random.normal((4, 6, 8), key=mx.random.key(1)).astype(mx.bfloat16)


@pytest.fixture
def stored(tmp_path: Path) -> FileView:
    """The values in a file, behind nine bytes of something else."""
    file = tmp_path / "tensor"
    file.write_bytes(b"x" * 9 + bytes(memoryview(np.array(VALUES.view(mx.uint8)))))
    return FileView.whole(str(file), 9, VALUES.shape, mx.bfloat16)


def read(view: FileView | None) -> mx.array:
    assert view is not None
    out = np.empty(view.nbytes, np.uint8)
    descriptor = os.open(view.file, os.O_RDONLY)
    try:
        view.read(descriptor, out)
    finally:
        os.close(descriptor)
    return mx.array(out.view(numpy_type(view.dtype))).view(view.dtype).reshape(view.shape)


@pytest.mark.parametrize(
    ("looked_at", "expected"),
    [
        (lambda v: v, lambda a: a),
        (lambda v: v.at(3), lambda a: a[3]),
        (lambda v: v.slice((1, 0, 2), (4, 6, 8), (1, 2, 3)), lambda a: a[1:4, 0:6:2, 2:8:3]),
        (lambda v: v.transpose((0, 2, 1)), lambda a: a.swapaxes(1, 2)),
        (lambda v: v.reshape((2, 2, 48)), lambda a: a.reshape(2, 2, 48)),
        (lambda v: v.view(mx.uint32), lambda a: a.view(mx.uint32)),
        (lambda v: v.astype(mx.float32), lambda a: a.astype(mx.float32)),
        (lambda v: v.astype(mx.float16), lambda a: a.astype(mx.float16)),
        (lambda v: v.at(1).transpose((1, 0)).astype(mx.float32), lambda a: a[1].T.astype(mx.float32)),
    ],
)
def test_a_view_reads_what_mlx_computes(
    stored: FileView,
    looked_at: Callable[[FileView], FileView | None],
    expected: Callable[[mx.array], mx.array],
) -> None:
    got, want = read(looked_at(stored)), expected(VALUES)
    assert got.dtype == want.dtype
    assert mx.array_equal(got, want).item()


def test_floats_are_rounded_as_mlx_rounds(tmp_path: Path) -> None:
    values = mx.concatenate([mx.random.normal((5000,)), mx.array([np.inf, -np.inf, np.nan, 0.0, 1.00390625])])
    (tmp_path / "t").write_bytes(bytes(memoryview(np.array(values))))
    view = FileView.whole(str(tmp_path / "t"), 0, values.shape, mx.float32).astype(mx.bfloat16)
    assert mx.array_equal(read(view), values.astype(mx.bfloat16), equal_nan=True).item()


def test_what_is_no_view_is_none(stored: FileView) -> None:
    assert stored.transpose((0, 2, 1)).reshape((4, 48)) is None
    assert stored.transpose((0, 2, 1)).view(mx.uint32) is None
    assert stored.astype(mx.uint32) is None


def test_a_file_that_ends_early_is_named(stored: FileView) -> None:
    os.truncate(stored.file, 50)
    with pytest.raises(CheckpointError, match="changed") as caught:
        read(stored)
    assert stored.file in str(caught.value)


def test_a_step_that_computes_is_not_in_place(stored: FileView) -> None:
    step = {"name": "Multiply", "arguments": [], "outputs": [("B", stored.shape, mx.bfloat16)]}
    with pytest.raises(NotInPlace, match="Multiply"):
        _follow(step, [Parts((stored,))])
    joined = {"name": "Concatenate", "arguments": [1], "outputs": [("B", (4, 12, 8), mx.bfloat16)]}
    with pytest.raises(NotInPlace, match="another axis"):
        _follow(joined, [Parts((stored,)), Parts((stored,))])


@pytest.mark.parametrize(
    ("text", "count"), [("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("250mb", 25 * 10**7), (77, 77)]
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "four", "4 XB", "-1GB", "GB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="no size"):
        bytes_of(text)


def test_slots_fill_the_budget_evenly() -> None:
    layers = [LayerSize(0, 8, 2, 100), LayerSize(1, 4, 2, 100), LayerSize(2, 8, 2, 300)]
    plan = plan_memory(layers, 2250)
    assert plan.slots == (5, 4, 4)
    assert plan.bytes == 2100
    assert plan_memory(layers, 10**6).slots == (8, 4, 8)
    assert plan_memory(layers, plan.least).slots == (2, 2, 2)


def test_a_budget_below_the_least_says_the_least() -> None:
    with pytest.raises(SettingError, match="does not hold") as caught:
        plan_memory([LayerSize(0, 8, 2, 1_000_001)], 2_000_001)
    assert "2.001MB" in str(caught.value)
    assert bytes_of(words(2_000_002)) >= 2_000_002
    assert bytes_of(words(1_234_567_891)) >= 1_234_567_891
