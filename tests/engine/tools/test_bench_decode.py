"""Decoding with fused on and off: counted, compared, and left as it was found."""

import mlx.core as mx
import pytest

from mlx_experts.engine.dispatch.expert_dispatch import BoundExperts
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.bench_decode import compare_decoding
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model():
    family = catalog().load("qwen3_moe")
    return build_tiny(family, tiny_config(family))


def blocks(model):
    return [m for m in model.modules() if isinstance(m, MoE)]


def test_both_paths_decode_the_same_text_and_every_layer_ran_fused(model):
    result = compare_decoding(model, mx.array(PROMPT), tokens=6, rounds=2)
    layers = len(blocks(model))
    assert layers > 1
    assert (result.layers, result.fused_per_token) == (layers, (float(layers), 0.0))
    assert (result.agree, result.tokens, result.gap) == (6, 6, None)
    assert result.ratio > 0


def test_the_first_difference_is_reported_with_its_gap(model, monkeypatch):
    real = BoundExperts.__call__

    def wrong(self, x, *routed):
        y, added = real(self, x, *routed)
        return (30 * mx.flip(y, axis=-1) if self.dispatch.fused and x.shape[1] == 1 else y), added

    monkeypatch.setattr(BoundExperts, "__call__", wrong)
    result = compare_decoding(model, mx.array(PROMPT), tokens=6, rounds=1)
    assert result.agree < 6
    assert result.gap is not None
    assert result.gap > 0


@pytest.mark.parametrize("fused", [True, False, None])
def test_the_models_own_setting_is_restored(model, fused):
    for block in blocks(model):
        block.use_fused(fused)
    compare_decoding(model, mx.array([4]), tokens=2, rounds=1)
    assert {block.fused for block in blocks(model)} == {fused}
