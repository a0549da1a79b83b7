"""Every script of examples/ runs on the demo checkpoint and prints what its docstring says."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DEMO = str(files("mlx_experts").joinpath("demo"))
# Arguments by script, and what it must print.
RUNS = {
    "generate_text.py": ([DEMO, "A mixture-of-experts model"], ["is a language model", "fused"]),
    "inspect_checkpoint.py": ([DEMO], ["qwen3_moe loads", "1 rows: fused"]),
}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_the_example_prints_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, wanted = RUNS[name]
    script = EXAMPLES / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert [text for text in wanted if text not in printed] == []
    assert f"python examples/{name}" in (ast.get_docstring(ast.parse(script.read_text())) or "")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "mlx_experts", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "mlx-experts" in done.stdout
