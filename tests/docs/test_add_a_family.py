"""The walk in docs/add-a-family.md, command by command, on a family that nothing knows."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry import cli

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "add-a-family.md"
BLOCK = re.compile(r"```(console|yaml)\n(.*?)```", re.S)


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unknown checkpoint, its tokenizer and the original's answers."""
    made = tmp_path_factory.mktemp("birch")
    subprocess.run([sys.executable, str(ROOT / "tests" / "docs" / "birch.py")], cwd=made, check=True)
    return made


@pytest.fixture
def folder(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its copy, in which the commands run."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of a command and what it prints; those of `registry` run in this process, as if anew."""
    name, *arguments = shlex.split(command)
    if name == "registry":
        catalog.cache_clear()
        capsys.readouterr()
        code = cli.run(arguments)
        said = capsys.readouterr()
        return code, said.out + said.err
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_command_on_the_page_does_what_the_page_shows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "yaml":
            (folder / "my_families" / "birch_moe.yaml").write_text(text)
            continue
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, *expected = part.strip().splitlines()
            code, printed = run(command, capsys)
            # The page shows the error that it begins with, and no other.
            assert code == (1 if expected and expected[0].startswith("error:") else 0), (
                f"{command}\n{printed}"
            )
            for line in expected:
                assert squeezed(line) in squeezed(printed), f"{command}\n{printed}"
            tried.append(command.split()[1] if command.startswith("registry") else command.split()[0])
    walk = ["inspect", "mkdir", "draft", "cat", "diff", "check", "check", "inspect", "parity", "generate"]
    assert tried == walk


def test_the_new_family_matches_the_original(folder: Path) -> None:
    families = folder / "my_families"
    families.mkdir()
    yaml = next(text for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if kind == "yaml")
    (families / "birch_moe.yaml").write_text(yaml)
    from mlx_experts.engine.tools.parity import against_arrays

    result = against_arrays(folder / "mystery", folder / "answers.npz", (families,))
    assert result.logits < 1e-5


def test_what_the_draft_guessed_is_right(folder: Path) -> None:
    from mlx_experts.engine.tools.drafts.draft import draft_family
    from mlx_experts.engine.tools.parity import against_arrays
    from mlx_experts.registry.checkpoint.checkpoint import Checkpoint

    draft = draft_family(Checkpoint.open(folder / "mystery"), catalog())
    families = folder / "my_families"
    families.mkdir()
    (families / "birch_moe.yaml").write_text(draft.to_yaml())
    assert against_arrays(folder / "mystery", folder / "answers.npz", (families,)).logits < 1e-5


@pytest.mark.report("M10")
def test_a_mistake_is_told_with_the_first_layer_that_departs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families = folder / "my_families"
    families.mkdir()
    yaml = next(text for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if kind == "yaml")
    right, wrong = ("checkpoint: {projections: [" + names + "]}" for names in ("w1, w3, w2", "w3, w1, w2"))
    swapped = yaml.replace(right, wrong)
    assert swapped != yaml
    (families / "birch_moe.yaml").write_text(swapped)
    code, printed = run(
        "registry parity --checkpoint ./mystery --reference answers.npz --families my_families", capsys
    )
    assert code == 2
    # The first layer has no experts, so that it agrees.
    assert "layer 1 (gqa with experts) departs first; layer 0 still agrees" in squeezed(printed)
