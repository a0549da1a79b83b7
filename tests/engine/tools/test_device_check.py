"""What a machine is told about its fused kernels: trusted, wrong, or not tried."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_experts.engine.dispatch import tuning_cache
from mlx_experts.engine.dispatch.policy import WIDTH_BOUND
from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.cpu import warm
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.tools.device import check, combinations, report


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """No setting of the machine that runs the tests."""
    monkeypatch.delenv(WIDTH_BOUND, raising=False)
    monkeypatch.setenv(tuning_cache.CACHE_DIR, str(tmp_path))


def test_kernels_that_agree_may_be_trusted() -> None:
    said = check.verdict()
    assert said.startswith("Device cpu: 24 of 24 combinations of format and activation dtype ran fused.")
    assert "may trust the fused path" in said
    assert trace.snapshot() == []


def test_a_kernel_that_is_nearly_right_is_not_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a percent off: less than the trial before first use notices."""
    right = cpu.FusedExperts.__call__
    monkeypatch.setattr(cpu.FusedExperts, "__call__", lambda self, *token: right(self, *token) * 1.005)
    said = check.verdict()
    assert "DO NOT TRUST IT" in said
    assert "affine 4-bit in float32: 5.0e-03" in said
    assert "may trust" not in said


def test_where_nothing_ran_nothing_is_said_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: Decline("numba", "numba", "none", "Install it."))
    said = check.verdict()
    assert "0 of 24 combinations" in said
    assert "24 were left to the gather path" in said
    assert "plain in float16 (numba)" in said
    assert said.endswith("says nothing about the kernels.")


def test_a_receipt_keeps_every_trial_and_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "_TIMED", combinations._TIMED[-1:])
    kept = check.run(times=True).receipt({"mlx": "1.2.3"})
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


def test_processes_are_as_many_as_cores_where_the_gpu_has_room_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "cores", lambda: 16)
    for info, jobs in (
        ({"free_memory": 139 << 30}, 16),
        ({"memory_size": 8 << 30}, 4),
        ({"free_memory": 1 << 30}, 1),
        ({}, 16),
    ):
        monkeypatch.setattr(mx, "device_info", lambda info=info: info)
        assert check.usual_jobs("cuda") == jobs
    assert check.usual_jobs("cpu") == 1


def test_a_trial_that_is_no_number_does_not_agree() -> None:
    trial = report.Trial("router", "", "float32", 1e-5, float("nan"))
    made = report.DeviceReport("cpu", (trial,), (), 0.0)
    assert not trial.agrees
    assert made.wrong == [trial]
    assert "DO NOT TRUST IT" in made.verdict()
    assert made.receipt({})["trusted"] is False
