"""What `registry parity` measures on synthetic experts: skips have a reason, and each row can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels import gather
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools import parity
from mlx_experts.engine.tools.parity import ExpertParity, synthetic_parity


def _rows(name: str) -> list[ExpertParity]:
    return list(synthetic_parity(catalog().load(name)))


def test_a_group_that_does_not_divide_a_width_is_skipped_with_the_reason() -> None:
    rows = _rows("kimi_k3")
    skipped = [row for row in rows if row.path == "skipped"]
    assert {(row.format, row.dtype) for row in skipped} == {
        ("affine 8-bit group 64", "float32"),
        ("affine 8-bit group 64", "bfloat16"),
    }
    assert all("groups of 64 do not divide the 32 inputs" in row.reason for row in skipped)
    measured = {row.format for row in rows if row.error is not None}
    assert len(measured) == len(parity.FORMATS) - 1
    assert all(row.ok for row in rows)


def test_a_family_of_kept_blocks_is_skipped_with_the_reason() -> None:
    (row,) = _rows("muse_spark")
    assert (row.path, row.error, row.ok) == ("skipped", None, True)
    assert "kept" in row.reason


def test_a_prompt_of_one_token_shows_every_layer() -> None:
    """Also on the CPU, where one token may stay in memory from layer to layer."""
    folder = Path(__file__).parents[2] / "cases" / "qwen3_moe" / "base" / "hub"
    result = parity.against_mlx_lm(folder, prompt=[7], tokens=2)
    assert len(result.layers) == 2
    assert result.first_difference is None


def test_every_measured_row_has_a_bound() -> None:
    rows = _rows("mixtral")
    assert {(row.path, row.dtype) for row in rows} == {
        (path, dtype) for path in ("fused", "gather") for dtype in ("float32", "bfloat16")
    }
    assert all(row.bound is not None and row.ok for row in rows)


def test_a_wrong_gathered_sum_in_bfloat16_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that rounds every product to bfloat16, with one share off by a twentieth."""
    right = gather.combine

    def wrong(outputs: mx.array, weights: mx.array, dtype: mx.Dtype) -> mx.array:
        return right(outputs, weights.astype(mx.bfloat16) * 1.05, dtype)

    monkeypatch.setattr(gather, "combine", wrong)
    rows = _rows("mixtral")
    narrow = [row for row in rows if (row.path, row.dtype) == ("gather", "bfloat16")]
    assert narrow
    assert not any(row.ok for row in narrow)
    assert all(row.ok for row in rows if row.path == "fused")


@pytest.mark.parametrize(("rule", "ok"), [("numba", True), ("contiguous", False)])
def test_one_row_that_was_to_run_fused_is_ok_only_for_an_expected_decline(
    monkeypatch: pytest.MonkeyPatch, rule: str, ok: bool
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: Decline(rule, "this", "that", "Do it."))
    declined = [row for row in _rows("mixtral") if row.reason]
    assert {(row.rows, row.path) for row in declined} == {(1, "gather")}
    assert len(declined) == 2 * len(parity.FORMATS)
    assert all("wanted this, got that" in row.reason for row in declined)
    assert [row.ok for row in declined] == [ok] * len(declined)


def test_an_error_that_is_no_number_is_not_ok() -> None:
    row = ExpertParity("a", "plain", "float32", 1, "fused", "", float("nan"), 1e-5)
    assert not row.ok
    assert replace(row, error=1e-6).ok
