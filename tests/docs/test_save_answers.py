"""The script that saves an original's answers gives what parity compares with, where torch is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_experts.engine.tools.parity import against_arrays

ROOT = Path(__file__).parent.parent.parent


def test_saved_answers_have_every_layer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    checkpoint = ROOT / "tests" / "cases" / "dots1" / "base" / "hub"
    script = ROOT / "scripts" / "save_answers.py"
    assert len([line for line in script.read_text().split('"""')[2].splitlines() if line]) <= 24
    subprocess.run([sys.executable, str(script), str(checkpoint), "answers.npz"], cwd=tmp_path, check=True)
    result = against_arrays(checkpoint, tmp_path / "answers.npz")
    assert result.ok
    assert result.departs is None
    assert len(result.layers) == 2
