"""What a machine is told about its fused kernels: trusted, wrong, or not tried."""

from __future__ import annotations

import pytest

from mlx_experts.engine.dispatch import tuning_cache
from mlx_experts.engine.dispatch.policy import WIDTH_BOUND
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.tools import device_check


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """No setting of the machine that runs the tests."""
    monkeypatch.delenv(WIDTH_BOUND, raising=False)
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path))


def test_kernels_that_agree_may_be_trusted() -> None:
    said = device_check.verdict()
    assert said.startswith("Device cpu: 24 of 24 combinations of format and activation dtype ran fused.")
    assert "may trust the fused path" in said
    assert trace.snapshot() == []


def test_a_kernel_that_is_nearly_right_is_not_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a percent off: less than the trial before first use notices."""
    right = cpu.FusedExperts.__call__
    monkeypatch.setattr(cpu.FusedExperts, "__call__", lambda self, *token: right(self, *token) * 1.005)
    said = device_check.verdict()
    assert "DO NOT TRUST IT" in said
    assert "affine 4-bit in float32: 5.0e-03" in said
    assert "may trust" not in said


def test_where_nothing_ran_nothing_is_said_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: Decline("numba", "numba", "none", "Install it."))
    said = device_check.verdict()
    assert "0 of 24 combinations" in said
    assert "24 were left to the gather path" in said
    assert "plain in float16 (numba)" in said
    assert said.endswith("says nothing about the kernels.")


def test_a_receipt_keeps_every_trial_and_what_was_timed() -> None:
    report = device_check.run(times=True)
    kept = report.receipt({"mlx": "1.2.3"})
    assert kept["trusted"] is True
    assert kept["ran_on"]["mlx"]
    assert kept["ran_on"]["device"]
    assert {t["kernel"] for t in kept["trials"]} == {"experts", "router", "pieces"}
    ran = [t for t in kept["trials"] if t["error"] is not None]
    assert len(ran) == 27
    assert all(t["agrees"] and t["error"] < t["bound"] for t in ran)
    assert all(t["reason"] == "device" for t in kept["trials"] if t["kernel"] == "pieces")
    assert {t["kernel"] for t in kept["times"]} == {"experts", "router"}
    assert all(min(t["ours_us"], t["mlx_us"]) > 0 for t in kept["times"])


def test_a_trial_that_is_no_number_does_not_agree() -> None:
    trial = device_check.Trial("router", "", "float32", 1e-5, float("nan"))
    report = device_check.DeviceReport("cpu", (trial,), (), 0.0)
    assert not trial.agrees
    assert report.wrong == [trial]
    assert "DO NOT TRUST IT" in report.verdict()
    assert report.receipt({})["trusted"] is False
