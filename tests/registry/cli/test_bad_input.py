"""What a command line makes of input that is not what it should be: a message and exit code 1."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_experts import load_model
from mlx_experts.registry import cli
from mlx_experts.registry.errors import SettingError

ROOT = Path(__file__).resolve().parents[3]
DEMO = str(ROOT / "api" / "demo")
COMMAND = [sys.executable, "-c", "from mlx_experts.registry.cli.entry import main; main()"]
Command = Callable[..., tuple[int, str, str]]
MIXTRAL = (ROOT / "families" / "mixtral.yaml").read_text()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, standard output and standard error of one command in this process."""

    def ran(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run(list(arguments))
        return code, *capsys.readouterr()

    return ran


def run(*arguments: str | bytes, stdin: bytes = b"", **env: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command as a process of its own."""
    done = subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, env={**os.environ, **env}, check=False
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode()


def family(folder: Path, more: str) -> Path:
    """A folder with one family like mixtral's and one more line."""
    text = MIXTRAL.replace("family: mixtral", "family: mine").replace("[mixtral]", "[mine]")
    (folder / "mine.yaml").write_text(text.replace("MixtralForCausalLM", "MineForCausalLM") + more)
    return folder


def test_an_interrupt_that_a_library_swallows_comes_once_more() -> None:
    program = textwrap.dedent(
        """
        import ctypes, os, signal, sys, time
        from mlx_experts.registry import cli
        from mlx_experts.registry.cli import entry as command

        def run(arguments):
            swallow = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(1))
            swallow()
            print("went on", flush=True)
            time.sleep(60)

        cli.run = run
        command.main()
        """
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert b"went on" in done.stdout
    assert done.returncode == 130
    assert time.monotonic() - start < 40


@pytest.mark.parametrize("how", ["standard input", "--prompt"])
def test_a_prompt_that_is_not_text_is_told(how: str) -> None:
    prompt: bytes = b"-" if how == "standard input" else b"\xff"
    code, out, err = run("generate", DEMO, b"--prompt", prompt, stdin=b"\xff\xfe")
    assert (code, out) == (1, "")
    assert "the prompt is not text" in err
    assert how in err


def test_a_terminal_without_a_sign_gets_a_question_mark() -> None:
    code, out, _ = run("generate", DEMO, "--prompt", "hi", "--max-tokens", "2", PYTHONIOENCODING="ascii")
    assert code == 0
    assert "tokens/s ?" in out


def test_a_folder_of_families_that_is_not_there_is_told_wherever_it_is_given(
    tmp_path: Path, command: Command
) -> None:
    code, _, err = command("generate", DEMO, "--prompt", "hi", "--families", str(tmp_path / "none"))
    assert code == 1
    assert "a folder of families does not exist" in err
    for given in ((tmp_path / "none",), str(tmp_path)):
        with pytest.raises(SettingError, match="famil"):
            load_model(DEMO, families=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (f"example: {{top_k: {'9' * 10_000}}}", "a number is too long"),
        ("example: {hidden_size: 100000000}", "the tiny model would not be tiny"),
    ],
)
def test_numbers_that_no_family_has_are_told_and_nothing_is_made_of_them(
    tmp_path: Path, more: str, words: str, command: Command
) -> None:
    code, _, err = command("check", "mine", "--families", str(family(tmp_path, more)))
    assert code in (1, 2)
    assert words in err


def test_a_file_of_brackets_is_told(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    """It is left out, and the other families are listed."""
    code, out, err = run("list", "--families", str(tmp_path))
    assert code == 0
    assert "deep.yaml" in err
    assert "mixtral" in out


def test_a_wrong_name_is_told_before_anything_is_measured(command: Command) -> None:
    start = time.monotonic()
    code, _, err = command("bench", "nope")
    assert code == 1
    assert "No public expert shape" in err
    assert time.monotonic() - start < 20


def test_a_closed_standard_input_harms_nothing() -> None:
    command = " ".join(
        f"'{part}'" for part in [*COMMAND, "generate", DEMO, "--prompt", "hi", "--max-tokens", "2"]
    )
    done = subprocess.run(["sh", "-c", f"{command} <&-"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
