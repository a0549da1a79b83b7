"""Adopting mlx-lm's models: what is shared, what is left alone, and what the report says."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, mixtral, qwen2_moe, qwen3_moe
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_experts import adopt, trace
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.adopt import Unfit, share
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError, UnknownFamilyError
from mlx_experts.registry.resolve.tiny_config import tiny_config

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
IDS = mx.array([[3, 17, 42, 5]])


def make(module: Any, model_type: str, **config: Any) -> Any:
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({"model_type": model_type, **COMMON, **config}))
    model.eval()
    return model


def make_mixtral() -> Any:
    return make(mixtral, "mixtral", num_local_experts=4)


def test_layers_are_shared_and_the_router_too() -> None:
    model = make_mixtral()
    before = model.model.layers[0].block_sparse_moe
    report = adopt(model)
    block = model.model.layers[0].block_sparse_moe
    assert isinstance(block, MoE)
    assert block.switch_mlp.down_proj is before.switch_mlp.down_proj
    assert block.gate is before.gate
    assert report.replaced == [f"model.layers.{i}.block_sparse_moe" for i in (0, 1)]
    assert str(report) == "mixtral: 2 MoE blocks replaced, 0 kept"


def test_modes_stay_as_they_were() -> None:
    model = make_mixtral()
    model.train()
    adopt(model)
    assert model.model.layers[0].block_sparse_moe.switch_mlp.training
    quiet = make_mixtral()
    adopt(quiet)
    assert not quiet.model.layers[0].block_sparse_moe.switch_mlp.training


def test_the_fused_path_can_be_forbidden() -> None:
    model = make_mixtral()
    nn.quantize(model, 32, 4)
    adopt(model, fused=False)
    trace.reset()
    mx.eval(model(IDS[:, :1]))
    assert trace.total("fused") == 0
    assert {row.reason for row in trace.snapshot()} == {"switch"}


def test_an_adapter_is_taken_along_and_stays_on_the_gather_path() -> None:
    model = make_mixtral()
    keys = {"block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.gate"}
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    for name, value in tree_flatten(model.trainable_parameters()):
        if name.endswith("lora_b"):
            value += 0.1 * mx.random.normal(value.shape)
    model.eval()
    want = model(IDS)
    mx.eval(want)
    report = adopt(model)
    assert not report.kept
    assert mx.allclose(model(IDS), want, atol=1e-5).item()
    trace.reset()
    mx.eval(model(IDS[:, :1]))
    assert {row.reason for row in trace.snapshot()} == {"adapted"}


def test_adopting_twice_says_so() -> None:
    model = make_mixtral()
    adopt(model)
    assert set(adopt(model).kept.values()) == {"the block is this package's already"}


def test_a_config_that_says_more_than_mlx_lm_keeps_is_followed() -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    config = {"model_type": "qwen2_moe", **COMMON, **sizes, "norm_topk_prob": True}
    plain, told = (make(qwen2_moe, "qwen2_moe", **sizes) for _ in range(2))
    want = plain(IDS)
    mx.eval(want)
    adopt(plain)
    adopt(told, config=config)
    assert mx.allclose(plain(IDS), want, atol=1e-5).item()
    assert not mx.allclose(told(IDS), want, atol=1e-3).item()


def test_a_block_of_another_shape_stays_and_the_reason_names_what_differs() -> None:
    model = make_mixtral()
    config = {"model_type": "mixtral", **COMMON, "num_local_experts": 8}
    report = adopt(model, config=config)
    assert not report.replaced
    assert all("'gate' is not of the shape [8, 64]" in reason for reason in report.kept.values())
    assert "model.layers.1.block_sparse_moe: 'gate' is not" in str(report)


@pytest.mark.parametrize("other", [mx.zeros((8,)), nn.Linear(2, 4)], ids=["shape", "layer"])
def test_an_array_is_only_taken_from_an_array_of_its_shape(other: object) -> None:
    theirs, ours = nn.Module(), nn.Module()
    theirs.bias, ours.bias = other, mx.zeros((4,))
    with pytest.raises(Unfit, match=r"'bias' is not of the shape \[4\]"):
        share(theirs, ours)


def test_experts_in_a_layer_that_the_config_calls_dense_are_mentioned() -> None:
    sparse = {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True}
    rules = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    model = make(qwen3_moe, "qwen3_moe", **sparse, **rules)
    config = {"model_type": "qwen3_moe", **COMMON, **sparse, **rules, "mlp_only_layers": [0]}
    report = adopt(model, config=config)
    assert report.replaced == ["model.layers.1.mlp"]
    assert report.kept == {"model.layers.0.mlp.switch_mlp": "the family describes no experts there"}


def test_a_block_that_is_spread_over_machines_stays() -> None:
    model = make(qwen3_moe, "qwen3_moe", num_experts=4, moe_intermediate_size=64, head_dim=16,
                 norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
    model.model.layers[0].mlp.sharding_group = object()
    report = adopt(model)
    assert report.kept == {"model.layers.0.mlp": "the block is spread over several machines"}


def test_models_that_cannot_be_adopted_are_refused() -> None:
    family = catalog().load("qwen3_moe")
    with pytest.raises(SettingError, match="this package built the model"):
        adopt(build_tiny(family, tiny_config(family)))
    with pytest.raises(SettingError, match="does not say what it was built from"):
        adopt(nn.Linear(4, 4))
    with pytest.raises(UnknownFamilyError):
        adopt(make(llama, "llama"))
