"""Heads that a checkpoint may lack, and modules that only some configs cut."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_experts import load_model, save_model
from mlx_experts.registry.errors import TensorError

CASES = Path(__file__).parents[2] / "cases"
KIMI = CASES / "kimi_linear" / "groups" / "hub"
IDS = mx.array([[3, 17, 42, 99, 5]])


def copy_without_head(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = {**json.loads((KIMI / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(KIMI / "model.safetensors"))
    kept = {name: value for name, value in tensors.items() if not name.startswith("lm_head")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    return folder


def test_a_head_in_the_checkpoint_wins_over_a_tie_that_the_original_does_not_make() -> None:
    model, config = load_model(KIMI)
    assert config["tie_word_embeddings"]
    stored = mx.load(str(KIMI / "model.safetensors"))
    assert mx.array_equal(model.lm_head.weight, stored["lm_head.weight"])
    assert not mx.array_equal(model.lm_head.weight, stored["model.embed_tokens.weight"])


def test_a_tied_head_that_the_checkpoint_lacks_is_the_embedding_and_is_not_written(tmp_path: Path) -> None:
    model, config = load_model(copy_without_head(tmp_path / "tied"))
    assert mx.array_equal(model.lm_head.weight, model.model.embed_tokens.weight)
    save_model(tmp_path / "again", model, config)
    written = mx.load(str(tmp_path / "again" / "model.safetensors"))
    assert not [name for name in written if name.startswith("lm_head")]
    again, _ = load_model(tmp_path / "again")
    assert mx.array_equal(again(IDS), model(IDS))


def test_a_head_that_nothing_ties_must_be_there(tmp_path: Path) -> None:
    folder = copy_without_head(tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(TensorError, match="do not fit"):
        load_model(folder)


@pytest.mark.parametrize(
    ("case", "module"), [("base", "shared_mlp.input_linear"), ("dense", "mlp.gate_proj")]
)
def test_a_matrix_is_cut_only_where_the_model_does_not_have_it_whole(case: str, module: str) -> None:
    model, _ = load_model(CASES / "granitemoehybrid" / case / "hub")
    names = {name for name, _ in tree_flatten(model.parameters())}
    assert f"model.layers.0.{module}.weight" in names
    assert model.converter.modules("model.layers.0.shared_mlp.input_linear")[0] == f"model.layers.0.{module}"
