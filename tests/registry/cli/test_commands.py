"""Every command: help with an example, JSON, and exit codes without a traceback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.cli import VERBS, run

CASES = Path(__file__).parent.parent.parent / "cases"
DEMO = Path(str(files("mlx_experts").joinpath("demo")))
CASE = str(CASES / "qwen3_moe" / "base" / "hub")
MAIN = "from mlx_experts.registry.cli.entry import main; main()"
COMMANDS = sorted(VERBS)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, command, "--help")
    assert code == 0
    assert f"Example: registry {command}" in " ".join(out.split())
    assert "--json" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_your_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, command, "--no-such-option")
    assert code == 1
    assert "--no-such-option" in err
    assert "Traceback" not in err


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "lisst")
    assert code == 1
    assert "list" in err


def test_no_command_shows_the_help_and_no_empty_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys)
    assert code == 1
    assert "inspect" in out
    assert err == ""


def test_the_version_names_what_results_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "--version")
    assert code == 0
    assert {"mlx-experts", "mlx", "mlx-lm"} <= set(out.replace(",", "").split())


@pytest.mark.parametrize(
    "arguments",
    [["--max-tokens", "0"], ["--seed", "-1"], ["--seed", str(2**64)], ["--temp", "inf"], ["--top-p", "0"]],
)
def test_numbers_that_cannot_be_are_refused_before_loading(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = output(capsys, "generate", "./no/such/folder", "--prompt", "x", *arguments)
    assert code == 1
    assert arguments[0] in err


def test_a_model_that_answers_with_nan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    file = str(tmp_path / "model" / "model.safetensors")
    tensors = dict(mx.load(file))
    tensors["model.norm.weight"] = mx.full((128,), float("nan"), mx.bfloat16)
    mx.save_safetensors(file, tensors, {"format": "mlx"})
    code, out, err = output(capsys, "generate", str(tmp_path / "model"), "--prompt", "A mixture")
    assert (code, out) == (1, "")
    assert "NaN" in err


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(CASE, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / "model")
    code, _, err = output(capsys, "generate", str(tmp_path / "model"), "--prompt", "A mixture of experts")
    assert code == 1
    assert "ids below 128" in err


@pytest.mark.parametrize("command", ["inspect", "draft", "parity --checkpoint"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("a" * 5000, "too long"), ("https://host/owner/name", "owner/name"), ("./no", "does not exist")],
)
def test_a_name_that_cannot_be_a_checkpoint_is_your_error(
    command: str, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = output(capsys, *command.split(), name)
    assert code == 1
    assert said in err


def test_a_reader_that_goes_away_is_no_error() -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{MAIN}' schema | head -c 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_is_no_bug_of_ours() -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{MAIN}' schema > /dev/full"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "No space left" in ran.stderr


def test_an_interrupt_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Catalog) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Catalog, "entries", property(interrupted))
    code, _, err = output(capsys, "list")
    assert code == 130
    assert err.startswith("interrupted")


@pytest.mark.parametrize("delay", [0.02, 0.04, 0.07, 0.1, 0.15])
def test_an_interrupt_while_the_command_line_is_imported_leaves_in_silence(delay: float) -> None:
    """The verb waits for its input, so that the signal comes before its end however fast the machine is."""
    script = MAIN.replace("main()", "print('here', flush=True); main()")
    command = [sys.executable, "-c", script, "generate", str(DEMO), "--prompt", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        code, errors = process.wait(60), process.stderr.read()
    assert code == 130
    assert errors in ("", "interrupted; nothing half-written was kept\n")


LOST = """
import signal, time, weakref
from mlx_experts.registry.cli.entry import catch_interrupts

class Thing: ...

catch_interrupts()
thing = Thing()
reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_a_callback_swallows_comes_again_in_silence() -> None:
    """An import leaves callbacks of weak references behind: Python prints what they raise and goes on."""
    command = [sys.executable, "-c", LOST]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted\n", "")


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = output(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_list_as_json_has_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "list")
    assert {"qwen3_moe", "mixtral", "gpt_oss"} <= {row["family"] for row in rows}


def test_list_as_a_table_counts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "list")
    assert code == 0
    assert "families" in out.splitlines()[-1]


def test_show_merges_what_is_inherited(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "show", "solar_open")["moe"]["router"]["score"] == "sigmoid"


def test_show_of_an_unknown_family_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "show", "mixtrall")
    assert code == 1
    assert "mixtral" in err


def test_schema_is_a_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    schema = as_json(capsys, "schema")
    assert schema["$defs"]["Family"]["properties"]["moe"]


def test_diff_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "diff", "qwen3_moe", "glm4_moe")
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("glm4_moe is the same as qwen3_moe except: ")
    for words in ("sigmoid scores", "selection bias", "one shared expert", "first layer dense"):
        assert words in first
    rows = as_json(capsys, "diff", "qwen3_moe", "glm4_moe")
    assert any(row["key"] == "moe.router.score" for row in rows)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("deepseek_v3", "latent attention, | 8 groups keep 4, | weights times 2.5, | first 3 layers dense"),
        ("gpt_oss", "biases on query, key and value and output, | sliding windows, | attention sinks, "),
        ("phimoe", "sparsemixer selection, | every layer sparse"),
    ],
)
def test_diff_speaks_of_what_sets_a_family_apart(
    family: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = output(capsys, "diff", "qwen3_moe", family)
    assert [each for each in words.split("| ") if each not in out.splitlines()[0]] == []


@pytest.mark.report("M16")
def test_diff_writes_keys_of_family_files_the_gate_and_no_row_that_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = output(capsys, "diff", "qwen3_moe", "qwen2_moe")
    first, heading, *rows = [line for line in out.splitlines() if line]
    assert heading == "key by key"
    assert "one shared expert behind a sigmoid gate" in first
    (shared,) = (row for row in rows if row.strip().startswith("moe.shared:"))
    assert "gate shared_expert_gate" in shared
    assert not [word for word in ("is_", "source", "not stated") if word in out]
    assert all(row.partition(": ")[2].partition(" (there ")[0] for row in rows)
    found = as_json(capsys, "diff", "qwen3_moe", "qwen2_moe")
    assert len(found) == len(rows)
    assert all(row["qwen3_moe"] != row["qwen2_moe"] for row in found)


def test_diff_can_say_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    for name in Catalog().names():
        assert output(capsys, "diff", "mixtral", name)[0] == 0


def test_diff_of_a_family_with_itself_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "diff", "mixtral", "mixtral") == []


def test_inspect_tells_everything_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    seen = as_json(capsys, "inspect", CASE)
    assert seen["family"] == "qwen3_moe"
    assert seen["loadable"]
    assert seen["fits"]
    assert {p["rows"] for p in seen["paths"]} == {1, 2, 8, 512}
    assert [p["path"] for p in seen["paths"] if p["rows"] == 1] == ["fused"]


def test_inspect_refuses_a_context_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "inspect", CASE, "--context", "0")[0] == 1


@pytest.mark.parametrize("command", ["inspect", "draft"])
def test_a_missing_folder_is_your_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, command, "./no/such/folder")
    assert code == 1
    assert "no/such/folder" in err


def test_parity_of_a_checkpoint_with_saved_answers(capsys: pytest.CaptureFixture[str]) -> None:
    reference = str(CASES / "qwen3_moe" / "base" / "oracle.npz")
    result = as_json(capsys, "parity", "--checkpoint", CASE, "--reference", reference)
    assert result["ok"]
    assert result["logits"] < 1e-4


def test_parity_with_mlx_lm_goes_layer_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, "parity", "--checkpoint", CASE)
    assert len(result["layers"]) == 2
    assert result["first_difference"] is None


def test_parity_that_fails_is_a_failed_check(capsys: pytest.CaptureFixture[str]) -> None:
    other = str(CASES / "mixtral" / "base" / "oracle.npz")
    code, _, err = output(capsys, "parity", "--checkpoint", CASE, "--reference", other)
    assert code == 2
    assert "disagree" in err


def test_parity_with_a_file_that_is_none_is_your_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    code, _, err = output(capsys, "parity", "--checkpoint", CASE, "--reference", str(tmp_path / "x.npz"))
    assert code == 1
    assert ".npz" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logits": np.zeros((2, 3, 64), np.float32)}, "another vocabulary"),
        ({"input_ids": np.full((2, 3), 500)}, "holds no answers"),
        ({"input_ids": np.full((2, 3), -1)}, "holds no answers"),
        ({"input_ids": np.zeros((2, 4), np.int64)}, "holds no answers"),
        ({"input_ids": np.zeros((2, 3))}, "holds no answers"),
        ({"greedy_ids": np.zeros((2, 3), np.int64)}, "holds no answers"),
    ],
)
def test_parity_with_answers_that_do_not_fit_is_your_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    answers = {"input_ids": np.zeros((2, 3), np.int64), "logits": np.zeros((2, 3, 128), np.float32)}
    np.savez(tmp_path / "x.npz", **(answers | change))
    code, _, err = output(capsys, "parity", "--checkpoint", CASE, "--reference", str(tmp_path / "x.npz"))
    assert code == 1
    assert said in err


def test_parity_of_nothing_is_your_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "parity")[0] == 1


def test_parity_of_a_family_keeps_every_bound(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "parity", "qwen3_moe")
    assert all(row["ok"] for row in rows)
    assert {row["path"] for row in rows} == {"fused", "gather"}


def test_parity_shows_a_format_that_a_width_rules_out_as_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = output(capsys, "parity", "kimi_k3", "muse_spark")
    assert (code, err) == (0, "")
    skipped = [line for line in out.splitlines() if "skipped" in line and "because" not in line]
    assert sum("affine 8-bit group 64" in line and "32 inputs" in line for line in skipped) == 2
    assert sum("muse_spark" in line and "kept" in line for line in skipped) == 1


def test_parity_of_a_path_that_is_wrong_is_a_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlx_experts.engine.tools.parity.GATHER_BOUNDS", dict.fromkeys(("float32", "bfloat16"), 1e-9)
    )
    code, out, err = output(capsys, "parity", "mixtral")
    assert code == 2
    assert "FAILED" in out
    assert "mixtral" in err


def test_draft_without_a_family_that_is_none_is_your_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "draft", CASE, "--without", "mixtrall")[0] == 1


def test_inspect_of_the_wrong_family_tells_no_sizes_wherever_the_checkpoint_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "memory"
    path.symlink_to(DEMO.resolve())
    code, out, _ = output(capsys, "inspect", str(path), "--family", "mixtral")
    assert code == 1
    assert "does not load" in out
    assert "\nmemory: " not in out
    assert "\nmemory: " in output(capsys, "inspect", str(path))[1]


def test_check_of_one_family_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, "check", "mixtral")
    assert result["families"][0]["fused"] == result["families"][0]["moe_layers"] > 0


def test_check_that_fails_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd_moe.yaml").write_text(
        "family: odd_moe\nextends: mixtral\nmodel_types: [odd_moe]\narchitectures: []\nreference: a test\n"
        "moe: {router: {select: no_such_selection}}\n"
    )
    code, _, err = output(capsys, "check", "odd_moe", "--families", str(tmp_path))
    assert code == 2
    assert "odd_moe" in err
    assert "no_such_selection" in err


def test_check_of_an_example_that_cannot_be_quantised_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd_moe.yaml").write_text(
        "family: odd_moe\nextends: mixtral\nmodel_types: [odd_moe]\narchitectures: []\nreference: a test\n"
        "example: {hidden_size: 36}\n"
    )
    code, _, err = output(capsys, "check", "odd_moe", "--families", str(tmp_path))
    assert code == 2
    assert "group of 32" in err


def test_check_of_an_unknown_family_is_your_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "check", "mixtrall")[0] == 1


def test_draft_writes_a_file_that_passes_the_fast_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = output(capsys, "draft", CASE, "--output", str(tmp_path))
    assert code == 0, err
    assert "qwen3_moe_draft.yaml" in out
    code, _, err = output(capsys, "check", "--fast", "qwen3_moe_draft", "--families", str(tmp_path))
    assert code == 0, err
    assert output(capsys, "draft", CASE, "--output", str(tmp_path))[0] == 1


def test_docs_outside_the_repository_are_your_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, "docs", "--root", str(tmp_path))[0] == 1


def test_a_bug_of_ours_leaves_a_report_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Catalog) -> list[str]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Catalog, "entries", property(broken))
    code, _, err = output(capsys, "list")
    assert code == 3
    assert "planted" in err
    report = Path(err.split("with the file ")[1].strip())
    assert "ZeroDivisionError" in report.read_text()
    report.unlink()


@pytest.fixture
def few_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_experts.engine.tools.device import combinations

    monkeypatch.setattr(combinations, "_FORMATS", combinations._FORMATS[:2])
    monkeypatch.setattr(combinations, "_TIMED", combinations._TIMED[:1])


@pytest.mark.report("M19")
def test_check_device_runs_no_family_that_is_not_named_and_ends_with_its_verdict(
    few_formats: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = tmp_path / "receipt.json"
    code, out, _ = output(capsys, "check", "--device", "--receipt", str(receipt))
    assert code == 0
    assert "families passed" not in out
    assert out.splitlines()[-1].startswith("Device cpu: 6 of 6 combinations")
    kept = json.loads(receipt.read_text(encoding="utf-8"))
    assert kept["trusted"] is True
    assert {"mlx", "mlx-lm", "mlx-experts", "machine", "device", "date"} <= kept["ran_on"].keys()
    assert kept["times"][0]["ratio"] > 0


def test_check_device_in_two_processes_says_what_it_says_in_one(
    few_formats: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [
        json.loads(output(capsys, "check", "--device", "--json", "--jobs", jobs)[1]) for jobs in ("1", "2")
    ]
    for each in kept:
        del each["seconds"]
    assert kept[0] == kept[1]


def test_jobs_of_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "check", "--jobs", "2")
    assert code == 1
    assert "add --device" in err


def test_check_device_beside_a_family_says_the_verdict_last_but_for_the_count(
    few_formats: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = output(capsys, "check", "olmoe", "--device")
    assert code == 0
    *_, verdict, count = out.splitlines()
    assert verdict.startswith("Device cpu")
    assert count.startswith("1 of 1 families passed")


@pytest.mark.parametrize(
    "arguments", [("--receipt", "r.json"), ("--device", "--fast", "--receipt", "r.json")]
)
def test_a_receipt_of_nothing_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = output(capsys, "check", *arguments)
    assert code == 1
    assert "add --device" in err


def test_a_receipt_in_a_missing_folder_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = output(capsys, "check", "--device", "--receipt", "nowhere/at/all.json")
    assert code == 1
    assert "folder" in err


def test_a_wrong_kernel_fails_the_check(
    few_formats: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx_experts.engine.kernels.cpu import experts as cpu

    right = cpu.FusedExperts.__call__
    monkeypatch.setattr(cpu.FusedExperts, "__call__", lambda self, *token: right(self, *token) * 1.01)
    code, out, err = output(capsys, "check", "--device")
    assert code == 2
    assert "DO NOT TRUST IT" in out
    assert "affine 4-bit in float32" in err
