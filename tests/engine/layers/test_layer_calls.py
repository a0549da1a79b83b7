"""What Python does for one token in one layer stays near what mlx-lm's model does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from mlx_experts import load
from mlx_experts.engine.dispatch.expert_dispatch import current_device

SCRIPT = Path(__file__).parents[3] / "scripts" / "count_calls.py"


@pytest.mark.skipif(current_device() != "cpu", reason="counts the CPU's path")
def test_a_layer_takes_few_calls_and_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    described = importlib.util.spec_from_file_location("count_calls", SCRIPT)
    assert described is not None
    assert described.loader is not None
    counting = importlib.util.module_from_spec(described)
    monkeypatch.setitem(sys.modules, "count_calls", counting)
    described.loader.exec_module(counting)
    # As a token goes through the demo: one call of compiled code a layer.
    whole = counting.count(load(counting.DEMO)[0])
    assert 15 < whole.python_calls <= 30
    assert whole.c_calls <= 20
    # With a call for each part, as where a linear layer is not this package's.
    parts = counting.count(counting.with_mlx_linear_layers(load(counting.DEMO)[0]))
    assert 20 < parts.python_calls <= 45
    assert parts.c_calls <= 67
    # Later releases of Python have other instructions.
    if sys.version_info[:2] == (3, 11):
        assert 15 < whole.branches <= 40
        assert 15 < parts.branches <= 54
