"""Commands of mlx-lm run in this process on this package's engine."""

from __future__ import annotations

import inspect
import re
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from dense_checkpoint import DEMO, write_dense
from mlx.utils import tree_flatten
from mlx_lm import cli
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_experts import load, trace
from mlx_experts.engine.loading import checkpoint_loader
from mlx_experts.engine.tools.mlx_lm_tools import run_tool, tools
from mlx_experts.registry.errors import SettingError, UnknownFamilyError

PROMPT = "A mixture-of-experts model"


def ran(name: str, *arguments: str, **options: Any) -> list[str]:
    """Run a command and return what was told."""
    told: list[str] = []
    run_tool(name, arguments, tell=told.append, options=options)
    return told


def test_every_command_of_mlx_lm_is_found() -> None:
    named = re.findall(r'^        "(\w+)",$', inspect.getsource(cli.main), re.M)
    assert len(named) > 15
    assert sorted(named) == list(tools())


def test_a_command_runs_on_our_engine_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = list(sys.argv)
    told = ran(
        "generate", "--model", str(DEMO), "--prompt", PROMPT, "--max-tokens", "6", "--verbose", "False"
    )
    assert told[0].startswith("mlx_lm.generate ")
    assert re.fullmatch(r"experts of mlx-experts: [1-9]\d* calls fused, \d+ gathered", told[-1])
    assert trace.total("fused") > 0
    assert capsys.readouterr().out.strip()
    assert sys.argv == argv


def test_the_fused_path_can_be_forbidden() -> None:
    arguments = ("--model", str(DEMO), "--prompt", PROMPT, "--max-tokens", "3", "--verbose", "False")
    assert "0 calls fused" in ran("generate", *arguments, fused=False)[-1]


def test_a_dense_draft_model_drafts_for_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_dense(tmp_path / "dense")
    arguments = ("--model", str(DEMO), "--prompt", PROMPT, "--max-tokens", "8", "--verbose", "False")
    ran("generate", *arguments)
    plain = capsys.readouterr().out
    told = ran("generate", *arguments, "--draft-model", str(dense))
    assert capsys.readouterr().out == plain
    assert sum("a dense model" in text for text in told) == 1


def test_an_unknown_command_is_named_with_its_neighbour() -> None:
    with pytest.raises(SettingError, match="no command 'serve'") as caught:
        ran("serve")
    assert caught.value.hint == "did you mean server?"


def test_what_a_command_raises_is_its_own_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"mlx_lm\.convert stopped") as caught:
        ran("convert", "--hf-path", str(DEMO), "--mlx-path", str(tmp_path))
    assert "already exists" in caught.value.found
    assert "convert.py:" in caught.value.where


@pytest.mark.parametrize("address", [("--port", "99999"), ("--host", "nowhere.invalid"), ("--port=-1",)])
def test_the_server_refuses_an_address_where_nobody_can_listen(address: tuple[str, ...]) -> None:
    """mlx-lm's would go on in its thread of generation, and neither serve nor end."""
    with pytest.raises(SettingError, match="cannot listen"):
        ran("server", "--model", str(DEMO), *address)


def test_the_server_refuses_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingError, match="cannot listen"):
            ran("server", "--model", str(DEMO), "--port", str(taken.getsockname()[1]))


def test_a_mistake_in_the_command_line_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ran("generate", "--model", str(DEMO), "--max-tokens", "many")
    assert caught.value.code == 1
    assert "invalid int value: 'many'" in capsys.readouterr().err


def test_a_bug_of_ours_is_no_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_loader, "prepare", lambda *a, **k: checkpoint_loader.build(None))
    with pytest.raises(AttributeError):
        ran("generate", "--model", str(DEMO), "--prompt", PROMPT, "--max-tokens", "2")


def test_the_server_refuses_a_model_before_it_listens(tmp_path: Path) -> None:
    """mlx-lm's would go on without its thread of generation."""
    folder = write_dense(tmp_path / "unknown", model_type="strange", architectures=["X"], num_experts=4)
    for key in ("--model", "--draft-model"):
        with pytest.raises(UnknownFamilyError):
            ran("server", key, str(folder), "--port", "0")


@pytest.mark.report("T5")
def test_a_checkpoint_keeps_its_dtype_when_adapters_are_fused_into_it(tmp_path: Path) -> None:
    """On a device that computes in float32 too."""
    model, _ = load(DEMO)
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 4.0, "dropout": 0.0})
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    trained = {n: v for n, v in tree_flatten(model.parameters()) if n.endswith((".lora_a", ".lora_b"))}
    mx.save_safetensors(str(adapters / "adapters.safetensors"), trained)
    rank = '{"rank": 2, "scale": 4.0, "dropout": 0.0}'
    settings = f'{{"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {rank}}}'
    (adapters / "adapter_config.json").write_text(settings)
    fused = tmp_path / "fused"
    ran("fuse", "--model", str(DEMO), "--adapter-path", str(adapters), "--save-path", str(fused))
    before = {name: value.dtype for name, value in mx.load(str(DEMO / "model.safetensors")).items()}
    after = {name: value.dtype for name, value in mx.load(str(fused / "model.safetensors")).items()}
    assert after == before


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_conversion_to_another_dtype_is_what_was_asked_for(dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran("convert", "--hf-path", str(DEMO), "--mlx-path", str(out), "-d", "--dtype", dtype)
    found = {str(value.dtype) for value in mx.load(str(out / "model.safetensors")).values()}
    assert found == {f"mlx.core.{dtype}"}


def test_the_tool_is_imported_by_its_own_name() -> None:
    for tool in tools().values():
        if tool.name != "evaluate":
            assert callable(import_module(tool.module).main)
