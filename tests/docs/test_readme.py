"""What README.md shows is what the commands print, and what the pages link to is there."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from mlx_experts.engine.kernels.cpu import start
from mlx_experts.engine.tools.mlx_lm_tools import run_tool
from mlx_experts.registry import cli
from mlx_experts.registry.cli import progress

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What differs between machines and runs.
MACHINE = re.compile(r"of [\d.]+ GB here|in [\d.]+ s$|[\d.]+ tokens/s|memory [\d.]+ GB")


def shown(language: str) -> list[str]:
    """The blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def session(command: str) -> list[str]:
    """The lines that are shown after a command, without spaces at their ends and what a machine decides."""
    (block,) = [text for text in shown("console") if text.startswith(f"$ {command}\n")]
    return comparable(block.partition("\n")[2])


def comparable(text: str) -> list[str]:
    return [MACHINE.sub("…", line.rstrip()) for line in text.strip().splitlines()]


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run where the repository is."""
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("in_the_repository")
@pytest.mark.parametrize("command", ["registry check qwen3_moe mixtral gpt_oss", "registry inspect api/demo"])
def test_a_command_prints_what_is_shown(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command.split()[1:]) == 0
    assert comparable(capsys.readouterr().out) == session(command)


@pytest.mark.usefixtures("in_the_repository")
def test_the_demo_writes_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """What only a first run tells has a test of its own."""
    _, made, _, *written = session("make demo")
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    prompt = re.search(r"^PROMPT \?= (.*)$", recipe, re.M)
    options = re.search(r"^\t\$\(BIN\)/registry (.*) \$\(ARGS\)$", recipe, re.M)
    assert prompt is not None
    assert options is not None
    assert made == f".venv/bin/registry {options[1]}".replace("$(PROMPT)", prompt[1])
    arguments = [each.strip('"') for each in re.findall(r'"[^"]*"|\S+', made)][1:]
    assert cli.run(arguments) == 0
    assert " ".join(comparable(capsys.readouterr().out)).split() == " ".join(written).split()


def test_the_first_run_of_the_demo_tells_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installing, _, compiling, *_ = session("make demo")
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f'@echo "{installing.replace(".venv", "$(VENV)")}"' in recipe
    assert "VENV := .venv\n" in recipe
    # As `generate` tells it on standard error.
    monkeypatch.setattr(logging.getLogger("mlx_experts.kernels"), "handlers", [])
    progress.tell_of_compiling()
    start.tell_of_compiling.cache_clear()
    start.tell_of_compiling()
    assert capsys.readouterr().err == f"{compiling}\n"


def test_the_family_that_is_shown_is_the_file() -> None:
    (text,) = shown("yaml")
    editors, _, rest = (ROOT / "families" / "mixtral.yaml").read_text(encoding="utf-8").partition("\n")
    assert editors.startswith("# yaml-language-server")
    assert text == rest


def test_every_verb_is_in_the_table() -> None:
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    verbs = {verb for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for verb in re.findall(r"\w+", cell)}
    names = set(cli.VERBS)
    assert names
    assert names - verbs == set()


def test_every_folder_of_the_layout_is_there() -> None:
    table = README.partition("## Layout")[2]
    folders = re.findall(r"^\| `([\w/]+)` \|", table, re.M)
    assert len(folders) == 8
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


def test_the_architecture_page_has_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("registry", "engine", "plugins")
        for path in (ROOT / top).rglob("__init__.py")
    } - {"registry", "engine"}
    named = set(re.findall(r"`((?:registry|engine|plugins)(?:/\w+)*)`", page)) - {"registry", "engine"}
    assert named <= rooms
    # A room inside a room may be named; the mixers' is.
    assert named >= {room for room in rooms if room.count("/") < 2 or room == "engine/layers/mixers"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.report("T9")
def test_the_lines_on_mlx_lm_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the demo in the place of a repository; mlx_lm.generate is a function that hides a module."""
    page = (ROOT / "docs" / "mlx-lm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    for block in blocks:
        text = re.sub(r'"mlx-community/[^"]*"', repr(str(ROOT / "api" / "demo")), block)
        assert text != block
        exec(compile(text, "docs/mlx-lm.md", "exec"), {})
    assert "4 MoE blocks replaced" in capsys.readouterr().out


def test_the_tools_of_mlx_lm_that_are_shown_take_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "mlx-lm.md").read_text(encoding="utf-8")
    lines = [
        line for line in page.splitlines() if re.search(r"mlx.experts[. ]run \w", line) and "`" not in line
    ]
    assert len(lines) >= 3
    for line in lines:
        tool, *arguments = re.split(r"mlx.experts[. ]run ", line)[1].split()
        with pytest.raises(SystemExit) as caught:
            run_tool(tool, ["--help"], tell=lambda text: None)
        assert caught.value.code == 0
        known = capsys.readouterr().out
        assert [each for each in arguments if each.startswith("--") and each not in known] == []
