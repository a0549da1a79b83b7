"""Decoding with fused on and off: counted, compared, and left as it was found."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from mlx_experts.engine import activations
from mlx_experts.engine.decoding import compare_decoding
from mlx_experts.engine.dispatch import ExpertDispatch


class Tiny(nn.Module):
    """Embedding, two MoE layers, head: enough to decode."""

    def __init__(self, containers):
        super().__init__()
        self.embed = nn.Embedding(50, 128)
        self.blocks = containers
        self.head = nn.Linear(128, 50, bias=False)
        for i in range(len(containers)):
            setattr(self, f"_dispatch_{i}", ExpertDispatch(f"layers.{i}", activations.make("swiglu"), True))

    @property
    def layers(self):
        return self.blocks

    def make_cache(self):
        return [KVCache() for _ in self.blocks]

    def __call__(self, tokens, cache=None):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            picks = mx.argsort(x[..., :6], axis=-1)[..., :2].astype(mx.uint32)
            weights = mx.softmax(mx.take_along_axis(x, picks, axis=-1), axis=-1)
            x = x + getattr(self, f"_dispatch_{i}")(block, x, picks, weights)
        return self.head(x)


@pytest.fixture
def model(container):
    mx.random.seed(0)
    made = Tiny([container(seed=1), container(seed=2)])
    made.eval()
    return made


def test_both_paths_decode_the_same_text_and_every_layer_ran_fused(model):
    result = compare_decoding(model, mx.array([1, 2, 3]), tokens=6, rounds=2)
    assert (result.layers, result.fused_per_token) == (2, (2.0, 0.0))
    assert (result.agree, result.tokens, result.gap) == (6, 6, None)
    assert result.ratio > 0


def test_the_first_difference_is_reported_with_its_gap(model, monkeypatch):
    real = ExpertDispatch.__call__

    def wrong(self, container, x, indices, weights):
        y = real(self, container, x, indices, weights)
        return -3 * y if self.fused and x.shape[1] == 1 else y

    monkeypatch.setattr(ExpertDispatch, "__call__", wrong)
    result = compare_decoding(model, mx.array([1, 2, 3]), tokens=6, rounds=1)
    assert result.agree < 6
    assert result.gap is not None
    assert result.gap > 0


def test_the_models_own_setting_is_restored(model):
    compare_decoding(model, mx.array([4]), tokens=2, rounds=1)
    assert model._dispatch_0.fused is True
