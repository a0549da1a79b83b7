"""numba that is there and cannot start: every command works on the gather path and says what to change.

numba reads its variables once, so every case is a process of its own: it generates text as the command does,
and then makes one call and tells what the call said.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from typing import Any

import numba
import pytest

from mlx_experts.engine.kernels.cpu import driver as cpu_driver
from mlx_experts.engine.kernels.cpu import start as cpu

DEMO = str(files("mlx_experts") / "demo")
CASES = {
    "no layer": ({"NUMBA_THREADING_LAYER": "nope"}, "'nope' is unknown", "NUMBA_THREADING_LAYER"),
    "a priority of no layers": (
        {"NUMBA_THREADING_LAYER_PRIORITY": "nope"},
        "THREADING_LAYER_PRIORITY invalid",
        "NUMBA_THREADING_LAYER_PRIORITY",
    ),
    "no threads": ({"NUMBA_NUM_THREADS": "0"}, "must be > 0", "NUMBA_NUM_THREADS"),
    "no compiler": ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT set", "NUMBA_DISABLE_JIT"),
}
GENERATE = ("generate", DEMO, "--prompt", "hi", "--max-tokens", "3", "--temp", "0", "--trace")
# What the command prints, and then what each kind of call of one token says.
CALL = """
import json, sys
{before}
if {command!r}:
    from mlx_experts.registry.cli.entry import main
    sys.argv[1:] = {command!r}
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
import mlx.core as mx
from mlx_experts import load_model, trace
trace.reset()
model, _ = load_model({folder!r})
model(mx.array([[3]]))
rows = [(row.path, row.reason, row.note) for row in trace.snapshot()]
print()
print(json.dumps(rows))
"""


def _ran(variables: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, "COLUMNS": "300", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _main(*arguments: str) -> tuple[str, ...]:
    return ("-c", "from mlx_experts.registry.cli.entry import main; main()", *arguments)


def _rows(variables: dict[str, str], before: str = "") -> list[Any]:
    ran = _ran(variables, "-c", CALL.format(before=before, command=(), folder=DEMO))
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout))


@cache
def _generated(case: str | None) -> tuple[str, str, list[Any]]:
    """What the command prints, what it prints as errors, and what a call after it says. None sets nothing."""
    variables = {} if case is None else CASES[case][0]
    ran = _ran(variables, "-c", CALL.format(before="", command=GENERATE, folder=DEMO))
    assert ran.returncode == 0, ran.stderr
    printed, _, rows = ran.stdout.strip().rpartition("\n")
    return printed, ran.stderr, list(json.loads(rows))


@pytest.mark.parametrize("case", CASES)
def test_a_call_is_gathered_and_names_what_numba_said_and_the_variable(case: str) -> None:
    _, said, variable = CASES[case]
    *_, rows = _generated(case)
    assert rows
    for path, reason, note in rows:
        assert (path, reason) == ("gather", "numba")
        assert said in note.split(". ")[0]
        assert variable in note.rsplit(". ", 1)[1]


def test_a_threading_layer_that_is_not_installed_is_gathered() -> None:
    """`tbb` may be installed; then the call runs fused."""
    variables = {"NUMBA_THREADING_LAYER": "tbb"}
    start = "import numba; numba.get_num_threads()"
    if _ran(variables, "-c", start).returncode == 0:
        pytest.skip("TBB is installed")
    rows = _rows(variables)
    assert {(path, reason) for path, reason, _ in rows} == {("gather", "numba")}
    assert all("No threading layer could be loaded" in note for *_, note in rows)


def test_a_numpy_that_numba_refuses_is_gathered() -> None:
    rows = _rows({}, "import numpy; numpy.__version__ = '99.0.0'")
    assert {(path, reason) for path, reason, _ in rows} == {("gather", "numba")}
    assert all("NumPy" in note and "belong together" in note for *_, note in rows)


def test_without_such_a_variable_the_call_runs_fused() -> None:
    assert {path for path, *_ in _generated(None)[2]} == {"fused"}


@pytest.mark.parametrize("case", CASES)
def test_generate_works_and_says_why_with_trace(case: str) -> None:
    _, said, variable = CASES[case]
    (printed, errors, _), (fused, *_) = _generated(case), _generated(None)
    said_all = " ".join((printed + errors).split())
    assert "gather" in said_all
    assert said in said_all
    assert variable in said_all
    assert printed.splitlines()[0] == fused.splitlines()[0]


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_what_needs_the_kernel_is_your_error_with_the_reason(command: str) -> None:
    ran = _ran({"NUMBA_DISABLE_JIT": "1"}, *_main(command))
    assert ran.returncode == 1
    assert "Unset NUMBA_DISABLE_JIT" in ran.stderr


def test_threads_that_meet_at_the_first_call_start_numba_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []

    def slow() -> int:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return 1

    monkeypatch.setattr(cpu_driver, "get_num_threads", slow)
    cpu._numba.cache_clear()
    before = dict(os.environ)
    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(cpu.unavailable) for _ in range(4)]]
    assert found == [None] * 4
    assert max(most) == 1
    assert dict(os.environ) == before


def test_compiling_is_told_once_and_only_of_our_own(caplog: pytest.LogCaptureFixture) -> None:
    def one(x: int) -> int:
        return x + 1

    def two(x: int) -> int:
        return x + 2

    cpu.tell_of_compiling.cache_clear()
    with caplog.at_level(logging.INFO, logger="mlx_experts.kernels"):
        numba.njit(one)(1)
        assert not caplog.records
        for function in (one, two):
            function.__module__ = "mlx_experts.engine.kernels.cpu.trial"
            numba.njit(function)(1.0)
    (record,) = caplog.records
    assert "compiling" in record.message


_TOGETHER = """
import os, threading
from mlx_experts import load, stream_generate

def text():
    model, tokenizer = load({demo!r})
    ids = "A mixture-of-experts model"
    return "".join(each.text for each in stream_generate(model, tokenizer, ids, max_tokens=6))

found = []
threads = [threading.Thread(target=lambda: found.append(text())) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), len(set(found)), flush=True)
os._exit(0)  # MLX's own streams of ended threads abort at the interpreter's end
"""


def test_two_threads_that_load_and_generate_at_once_get_the_same_text() -> None:
    """Each writes the kernels' machine code for itself at its first call."""
    code = _TOGETHER.format(demo=str(files("mlx_experts").joinpath("demo")))
    done = _ran({}, "-W", "error::RuntimeWarning", "-c", code)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "1"]), done.stderr
