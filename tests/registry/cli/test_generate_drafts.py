"""`registry generate` with a draft prints the same text, and what drafting did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dense_checkpoint import DEMO, write_dense

from mlx_experts.registry.cli import run

COMMON = ("generate", str(DEMO), "--prompt", "A mixture-of-experts model", "--max-tokens", "16")


def test_a_draft_model_changes_the_account_and_not_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_dense(tmp_path / "dense")
    assert run([*COMMON, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*COMMON, "--draft-model", str(dense), "--always-draft", "--json"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["text"] == plain["text"]
    assert "drafting" not in plain
    assert drafted["drafting"]["drafted"] > 10
    assert drafted["drafting"]["rate"] == drafted["drafting"]["accepted"] / drafted["drafting"]["drafted"]
    assert run([*COMMON, "--draft-model", str(DEMO), "--always-draft", "--num-draft-tokens", "2"]) == 0
    assert "accepted (100%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--mtp",), "describes no prediction layers"),
        (("--mtp", "--draft-model", str(DEMO)), "describes no prediction layers"),
        (("--draft-model", "nowhere/at/all"), "does not exist"),
    ],
)
def test_what_cannot_draft_is_refused(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMON, *options]) == 1
    assert says in capsys.readouterr().err
