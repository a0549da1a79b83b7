"""What transformers' config classes and conversion table say answers a draft's questions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.drafts.draft import draft_family, draft_of_original, with_defaults
from mlx_experts.engine.tools.drafts.facts import read_facts
from mlx_experts.engine.tools.drafts.original import original
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import SettingError

CASES = Path(__file__).parents[2] / "cases"


def test_the_table_says_which_of_two_leaves_is_the_gate() -> None:
    assert original("mixtral").gate_up == ("w1", "w3")
    assert original("qwen3_moe").gate_up == ("gate_proj", "up_proj")
    assert (".block_sparse_moe.", ".mlp.") in original("mixtral").renames
    names = (("w3", (12, 32)), ("w1", (12, 32)), ("out", (32, 12)))
    tensors = {
        f"model.layers.0.mlp.{rest}": SimpleNamespace(shape=shape)
        for rest, shape in (
            *((f"experts.{e}.{name}.weight", shape) for e in range(8) for name, shape in names),
            ("gate.weight", (8, 32)),
        )
    }
    config = {"hidden_size": 32, "num_experts": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    assert not read_facts(config, tensors).experts.certain  # type: ignore[union-attr]
    told = read_facts(config, tensors, original("mixtral")).experts
    assert told is not None
    assert told.certain
    assert told.layout["projections"] == ["w1", "w3", "out"]


def test_defaults_of_the_class_are_stated_for_keys_that_a_config_leaves_out() -> None:
    source = original("qwen3_moe")
    assert source.completed({"hidden_size": 8})["hidden_size"] == 8
    family = with_defaults(catalog().load("qwen3_moe"), {"hidden_size": 8}, source)
    assert family.moe.router.renormalize.enabled.default is source.defaults["norm_topk_prob"]
    stated = with_defaults(catalog().load("qwen3_moe"), {"norm_topk_prob": True}, source)
    assert stated.moe.router.renormalize.enabled.default is False


def test_a_type_answers_questions_that_a_config_leaves_open(tmp_path: Path) -> None:
    case = CASES / "qwen3_moe" / "base" / "hub"
    config = json.loads((case / "config.json").read_text())
    del config["norm_topk_prob"]
    config |= {"model_type": "unheard_of", "architectures": ["UnheardOf"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to((case / "model.safetensors").resolve())
    opened = Checkpoint.open(tmp_path)
    alone = draft_family(opened, catalog())
    answered = draft_family(opened, catalog(), (), original("qwen3_moe"))
    assert any("moe.router.renormalize:" in text for text in alone.questions)
    assert not any("moe.router.renormalize:" in text for text in answered.questions)


def test_a_type_alone_is_drafted_and_what_tensors_show_is_asked() -> None:
    draft = draft_of_original(original("qwen3_moe"), catalog(), ("qwen3_moe",))
    assert draft.family.startswith("qwen3_moe")
    assert draft.asked


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(SettingError, match="no model type") as caught:
        original("qwen3_moee")
    assert "qwen3_moe" in caught.value.hint
