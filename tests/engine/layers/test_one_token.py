"""A usual layer's call for one token on the CPU gives what its steps in MLX give."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.layers.decode import one_token, whole_layer
from mlx_experts.engine.models import decoder
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config


def logits_of(model, prompt=9, tokens=5, dtype=mx.float32):
    """Logits of single tokens after a prompt."""
    model.set_dtype(dtype)
    model.eval()
    mx.random.seed(5)
    ids = mx.random.randint(0, 60, (1, prompt + tokens))
    cache = make_prompt_cache(model)
    model(ids[:, :prompt], cache=cache)
    return mx.concatenate(
        [model(ids[:, i : i + 1], cache=cache) for i in range(prompt, prompt + tokens)], axis=1
    )


@pytest.fixture
def calls(monkeypatch):
    """How many calls of layers in memory there were."""
    seen, right = [], one_token._attended
    monkeypatch.setattr(one_token, "_attended", lambda *a: (seen.append(0), right(*a))[1])
    whole = whole_layer.WholeLayer.__call__

    def counted(*given):
        found = whole(*given)
        if found is not None:
            seen.append(0)
        return found

    monkeypatch.setattr(whole_layer.WholeLayer, "__call__", counted)
    return seen


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "glm4_moe"])
def test_logits_are_those_of_the_steps_in_mlx(family, tiny_model, calls, monkeypatch):
    made = logits_of(tiny_model(family))
    assert calls or family == "olmoe"  # whose norms go over all heads
    calls.clear()
    monkeypatch.setattr(decoder, "one_token", lambda *given: given[4])
    wanted = logits_of(tiny_model(family))
    assert not calls
    assert (mx.linalg.norm(made - wanted) / mx.linalg.norm(wanted)).item() < 1e-5


def test_narrow_activations_and_the_switch_keep_mlx(tiny_model, calls, monkeypatch):
    logits_of(tiny_model("qwen3_moe"), dtype=mx.bfloat16)
    monkeypatch.setenv("MLX_EXPERTS_FUSED", "0")
    logits_of(tiny_model("qwen3_moe"))
    assert calls == []


def test_a_planted_fault_is_seen(tiny_model, calls, monkeypatch):
    wanted = logits_of(tiny_model("qwen3_moe"))
    right = one_token._angles
    monkeypatch.setattr(one_token, "_angles", lambda rope: lambda position: right(rope)(position + 1))
    # Keys of the prompt were turned by MLX: one position off does not cancel.
    made = logits_of(tiny_model("qwen3_moe"))
    assert (mx.linalg.norm(made - wanted) / mx.linalg.norm(wanted)).item() > 1e-4


@pytest.fixture
def tiny_model():
    """A model of a family's smallest config with fixed random weights."""

    def make(name):
        family = catalog().load(name)
        return build_tiny(family, tiny_config(family))

    return make
