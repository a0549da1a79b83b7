"""Whole models of random weights: the same arrays in both, and each part of a token accounted for."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_experts.engine.tools import bench_model, random_model
from mlx_experts.engine.tools.bench_experts import Storage, storage_of
from mlx_experts.registry.catalog.public_models import models, public_model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "num_hidden_layers": 2,
}


def build(storage: Storage, experts_only: bool = False):
    """A small qwen3_moe, twice."""
    config = public_model("qwen3_moe").config | SMALL
    return random_model.build(config, storage, mx.float32, experts_only=experts_only)


@pytest.fixture(scope="module")
def pair():
    return build(storage_of("affine", 4, 32))


def test_both_models_hold_the_very_same_arrays(pair):
    theirs, ours = (dict(tree_flatten(model.parameters())) for model in pair)
    assert theirs.keys() == ours.keys()
    assert all(theirs[name] is ours[name] for name in theirs)
    assert {f"model.layers.0.mlp.gate.{leaf}" for leaf in ("weight", "scales", "biases")} <= theirs.keys()


def test_random_weights_are_numbers_of_a_sensible_size(pair):
    logits = pair[0](mx.array([[1, 2, 3]]))
    assert mx.isfinite(logits).all().item()
    assert 0.1 < logits.std().item() < 10


def test_only_the_experts_are_quantised_where_asked():
    theirs, _ = build(storage_of("mxfp4", 4, 32), experts_only=True)
    quantised = {type(m) for m in theirs.modules() if "scales" in m}
    assert quantised == {QuantizedSwitchLinear}
    assert isinstance(theirs.model.layers[0].self_attn.q_proj, nn.Linear)


def test_a_comparison_accounts_for_the_token(pair):
    result = bench_model.compare(*pair, 96, tokens=8, rounds=2, prefill=5)
    assert (result.agree, result.tokens) == (16, 16)
    assert result.logit_distance < 1e-5
    for side in (result.theirs, result.ours):
        assert side.tokens_per_second > 0
        assert side.prefill is not None
        assert side.prefill > 0
        assert min(side.split.python_ms, side.split.encode_ms, side.split.wait_ms) > 0
        assert side.kernels is None or side.kernels.count > 0
    fused = sum(count for name, count in result.traced.items() if name.startswith("fused 1"))
    assert fused >= 2  # one call a layer, and those of the prompt's end


@pytest.mark.parametrize("family", [model.family for model in models()])
def test_every_public_model_has_mlx_lms_parameters(family):
    config = public_model(family).config_with(layers=4, vocab=64)
    # Nothing is computed before the first use: the shapes are all that is looked at.
    from mlx_lm.utils import _get_classes

    from mlx_experts.engine.models.factory import get_model_classes

    names = []
    for classes in (_get_classes, get_model_classes):
        model_class, args_class = classes(config)
        model = model_class(args_class.from_dict(config))
        names.append({name: array.shape for name, array in tree_flatten(model.parameters())})
    assert names[0] == names[1]


def test_the_distance_to_float32_is_that_of_roundings():
    config = public_model("qwen3_moe").config | SMALL
    theirs, ours = random_model.build(config, storage_of("affine", 4, 32), mx.bfloat16, experts_only=False)
    result = bench_model.compare(theirs, ours, SMALL["vocab_size"], tokens=2, rounds=1, truth=True)
    assert result.truth_distances is not None
    distance_of_theirs, distance_of_ours = result.truth_distances
    assert 1e-4 < distance_of_ours < 5e-2
    assert distance_of_theirs < 0.2
    assert theirs.model.norm.weight.dtype == mx.float32
    assert ours.decoder.norm.weight.dtype == mx.bfloat16
