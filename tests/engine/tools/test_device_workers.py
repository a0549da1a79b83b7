"""Combinations of a device's check in several processes: alike, apart in time, and none left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from device_combinations import Failing, Noted

from mlx_experts.engine.tools.bench_experts import Storage
from mlx_experts.engine.tools.device import workers
from mlx_experts.engine.tools.device.combinations import Experts, Piece
from mlx_experts.plugins import manager
from mlx_experts.registry.errors import DeviceError, SettingError

ROOT = Path(__file__).parents[3]


class Step(NamedTuple):
    """When and in which process a combination did something."""

    process: int
    begun: float
    ended: float


def steps(folder: Path, what: str) -> dict[str, Step]:
    """Steps by the combination's name."""
    found = {}
    for path in folder.glob(f"{what} *"):
        process, begun, ended = path.read_text(encoding="utf-8").split()
        found[path.name.removeprefix(f"{what} ")] = Step(int(process), float(begun), float(ended))
    return found


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, list]:
    """What two processes did: three that share kernels, three others that do, and what is timed."""
    folder = tmp_path_factory.mktemp("noted")
    asked = [Noted(f"{group}{n}", group, folder, n == 2, processes=2) for group in "ab" for n in range(3)]
    return folder, *workers.run(asked, "cpu", 2)


def test_trials_and_times_come_in_the_order_in_which_they_were_asked_for(noted) -> None:
    _, trials, times = noted
    assert [trial.kernel for trial in trials] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [timed.kernel for timed in times] == ["a2", "b2"]


def test_what_shares_kernels_runs_in_one_process_and_the_rest_beside_it(noted) -> None:
    ran = steps(noted[0], "run")
    processes = [{ran[f"{group}{n}"].process for n in range(3)} for group in "ab"]
    assert [len(each) for each in processes] == [1, 1]
    assert processes[0] != processes[1]
    assert os.getpid() not in processes[0] | processes[1]


def test_times_are_taken_one_at_a_time_when_all_has_been_compiled(noted) -> None:
    ran, timed = steps(noted[0], "run"), steps(noted[0], "time")
    assert max(each.ended for each in ran.values()) < min(each.begun for each in timed.values())
    assert timed["a2"].ended < timed["b2"].begun
    assert {name: timed[name].process for name in timed} == {name: ran[name].process for name in timed}


def test_a_large_group_that_shares_kernels_is_shared_out_at_the_end(tmp_path: Path) -> None:
    asked = [Noted(str(number), "all", tmp_path, processes=2) for number in range(4)]
    workers.run(asked, "cpu", 2)
    assert len({each.process for each in steps(tmp_path, "run").values()}) == 2


def test_another_process_says_of_a_kernel_what_this_one_says_and_has_the_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "told.py"
    plugin.write_text(f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n")
    monkeypatch.setattr(manager, "_FILES", [plugin])
    asked = [Experts(Storage("affine", 4, 64), "bfloat16"), Piece("router", "float32", True)]
    trials, times = workers.run(asked, "cpu", 1)
    monkeypatch.setattr(manager, "_FILES", [])
    assert trials == [combination.run().trial for combination in asked]
    assert all(trial.agrees for trial in trials)
    assert [(timed.kernel, timed.dtype) for timed in times] == [("router", "float32")]
    assert min(times[0].ours_us, times[0].mlx_us) > 0
    loaded = {path.name for path in tmp_path.iterdir() if path.name.isdigit()}
    assert len(loaded) == 1
    assert str(os.getpid()) not in loaded


@pytest.mark.parametrize("timed", [False, True], ids=["running", "timing"])
def test_a_process_that_is_killed_is_told_with_its_combination(timed: bool, tmp_path: Path) -> None:
    asked = [Failing("router in float16", "killed", timed), Noted("other", "other", tmp_path)]
    begun = time.monotonic()
    with pytest.raises(DeviceError) as told:
        workers.run(asked, "cpu", 2)
    assert time.monotonic() - begun < 20
    assert told.value.where == "router in float16"
    assert told.value.found == "the signal 'Killed'"
    assert "`--jobs`" in told.value.hint


def test_a_combination_that_fails_is_told_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceError) as told:
        workers.run([Failing("router in float16", "broken")], "cpu", 1)
    assert told.value.where == "router in float16"
    assert told.value.found == "RuntimeError: Failed to compile kernel: identifier is undefined."
    assert "--jobs 1" in told.value.hint
    assert capfd.readouterr() == ("", "")


def test_an_error_of_ours_comes_through_with_the_combination() -> None:
    with pytest.raises(SettingError) as told:
        workers.run([Failing("time of experts, plain", "refused", True)], "cpu", 1)
    assert told.value.what == "No fused kernel takes this call."
    assert told.value.where == "rows\nof time of experts, plain"


def children(process: int) -> set[int]:
    """The processes that one has started; none where it is gone."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8")
    except FileNotFoundError:
        return set()
    return {int(each) for each in text.split()}


def alive(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true, seconds: float = 20.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not (now := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(now)


@pytest.fixture
def checking(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], set[int]]]:
    """A command that checks its device in two processes, which have started, and all its processes."""
    command = [sys.executable, "-c", "from mlx_experts.registry.cli.entry import main; main()"]
    with subprocess.Popen(
        [*command, "check", "--device", "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a process that is killed leaves its folder
    ) as process:
        # The workers, and multiprocessing's own.
        assert wait_until(lambda: len(children(process.pid)) == 3)
        yield process, children(process.pid)
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("after", [0.0, 1.0], ids=["as they start", "as they import"])
def test_an_interrupt_ends_every_process_and_shows_no_traceback(checking, after: float) -> None:
    process, started = checking
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (out, err) == (b"", b"interrupted; nothing half-written was kept\n")
    assert wait_until(lambda: not any(map(alive, started)), 5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_command_that_is_killed(checking) -> None:
    process, started = checking
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(alive, started)))
