"""mlx-lm's own commands on this package's models, by the one line that docs/mlx-lm.md gives."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_experts import generate, load, trace
from mlx_experts.engine.models.model import Model
from mlx_experts.registry.errors import SettingError

DEMO = str(files("mlx_experts").joinpath("demo"))
PROMPT = "A mixture-of-experts model"


def test_load_takes_what_mlx_lm_passes() -> None:
    model, tokenizer, config = load(DEMO, {}, lazy=True, return_config=True, trust_remote_code=False)
    assert isinstance(model, Model)
    assert tokenizer.encode(PROMPT)
    assert config["num_experts"] == 16


def test_code_of_a_checkpoint_is_refused_and_not_ignored() -> None:
    with pytest.raises(SettingError, match="never run"):
        load(DEMO, trust_remote_code=True)


def test_the_server_serves_our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    server = import_module("mlx_lm.server")
    monkeypatch.setattr(server, "load", load)
    settings = {name: None for name in ("adapter_path", "draft_model", "chat_template")}
    flags = {"trust_remote_code": False, "use_default_chat_template": False, "pipeline": False}
    provider = server.ModelProvider(argparse.Namespace(model=DEMO, **settings, **flags))
    provider.load_default()
    assert isinstance(provider.model, Model)
    assert provider.is_batchable


def test_convert_writes_what_both_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    convert = import_module("mlx_lm.convert")
    monkeypatch.setattr(convert, "load", load)
    convert.convert(DEMO, str(tmp_path / "whole"), dequantize=True)
    convert.convert(
        str(tmp_path / "whole"), str(tmp_path / "eight"), quantize=True, q_bits=8, q_group_size=32
    )
    ids = mx.array([[1, 2, 3, 4]])
    ours, _ = load(tmp_path / "eight")
    theirs, _ = import_module("mlx_lm.utils").load(str(tmp_path / "eight"))
    theirs.apply(lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v)
    want = theirs(ids)
    assert mx.abs(ours(ids) - want).max().item() < 1e-5 * mx.abs(want).max().item()


class Sentences:
    """Token lists in the form that mlx-lm's trainer iterates."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> tuple[list[int], int]:
        return self._tokens, 0

    def itemlen(self, _: int) -> int:
        return len(self._tokens)


def test_the_trainer_trains_adapters_and_their_layers_leave_the_fused_path(tmp_path: Path) -> None:
    model, tokenizer = load(DEMO)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 4.0, "dropout": 0.0})
    before = {name: mx.array(value) for name, value in tree_flatten(model.trainable_parameters())}
    data = Sentences(tokenizer.encode("Bananas are yellow and experts are few.") * 2)
    settings = {
        "steps_per_eval": 100,
        "val_batches": 1,
        "adapter_file": str(tmp_path / "adapters.safetensors"),
    }
    arguments = TrainingArgs(batch_size=2, iters=2, steps_per_report=2, max_seq_length=32, **settings)
    train(model, optimizers.Adam(learning_rate=1e-2), data, data, args=arguments)
    after: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert any("switch_mlp" in name for name in changed)
    model.eval()
    trace.reset()
    generate(model, tokenizer, PROMPT, max_tokens=3)
    single = {row.layer: (row.path, row.reason) for row in trace.snapshot() if row.rows == "1"}
    assert single["model.layers.0.mlp"][0] == "fused"
    assert single["model.layers.3.mlp"] == ("gather", "adapted")
