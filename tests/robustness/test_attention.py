"""Norms of queries and keys, and rotations, stand where the family says: written out here in numpy."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from representatives import mixers, one_of_each

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.mixers.adjusted import AdjustedAttention
from mlx_experts.engine.layers.rope import Rope
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.spec.rope_plan import RopePlan

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]

# Whose heads are made otherwise, each held in tests/engine/layers/mixers/test_adjusted.py.
OWN_HEADS = {"interns1pro": "mixed frequencies", "k2_horizon": "a norm for each head, and split halves"}


def attentions(model: Any) -> list[Attention]:
    """One attention of each kind of layer."""
    found = {}
    for layer in model.args.plan.layers:
        inside = [m for m in model.layers[layer.index].modules() if isinstance(m, Attention)]
        found.setdefault(layer.type, inside[:1])
    return [each for group in found.values() for each in group]


def normed(t: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    scaled = t / np.sqrt((t**2).mean(-1, keepdims=True) + eps)
    return scaled if weight is None else scaled * weight


def rotated(t: np.ndarray, rope: Rope, offset: int) -> np.ndarray:
    """Heads [h, L, d] turned pair by pair, each pair by its own frequency times the position."""
    waves, factor = rope._frequencies(offset, t.shape[-2])
    angles = (offset + np.arange(t.shape[-2]))[:, None] / np.array(waves)[None]
    cos, sin = np.cos(angles), np.sin(angles)
    result, half = t.copy(), rope.dims // 2
    first, second = slice(half), slice(half, 2 * half)
    if rope.traditional:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = t[..., first] * factor, t[..., second] * factor
    result[..., first], result[..., second] = a * cos - b * sin, a * sin + b * cos
    return result


@pytest.mark.report("QKN-01", "QKN-03")
@pytest.mark.parametrize("name", one_of_each(mixers, [n for n in FAMILIES if n not in OWN_HEADS]))
def test_queries_are_normed_and_turned_as_declared(name: str, lab: Any) -> None:
    """Over the whole projection or over each head, before or after the rotation."""
    model, _ = lab.tiny(name)
    for attention in attentions(model):
        spec, leaf, heads = attention._spec, attention._leaves[0], attention.heads
        if isinstance(attention, AdjustedAttention) and attention._adjusted.key_norm_only:
            # Queries have no norm there.
            leaf, heads = attention._leaves[1], attention.kv_heads
        qk = spec.qk_norm if spec.qk_norm is not None and spec.qk_norm.enabled else None
        mx.random.seed(2)
        q = mx.random.normal((1, 5, heads * attention.head_dim)) * 2
        want = np.array(q[0], dtype=np.float64)
        weight = None
        if qk is not None and qk.weight:
            weight = np.array(attention[leaf].weight) + (model.args.plan.norm.offset == "run")
            assert weight.shape == ((want.shape[-1],) if qk.over == "full" else (attention.head_dim,))
        if qk is not None and qk.over == "full":
            want = normed(want, weight, attention._eps)
        if spec.clip is not None:
            want = np.clip(want, -spec.clip, spec.clip)
        want = want.reshape(5, heads, -1).swapaxes(0, 1)
        if qk is not None and qk.over == "head" and not qk.after_rope:
            want = normed(want, weight, attention._eps)
        if attention._rope is not None:
            want = rotated(want, attention._rope, 3)
        if qk is not None and qk.over == "head" and qk.after_rope:
            want = normed(want, weight, attention._eps)
        got = np.array(attention.bind_heads(heads, leaf)(q, 3)[0])
        assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()


def test_a_width_for_the_scale_that_the_config_states_takes_the_place_of_the_heads(lab: Any) -> None:
    plain, stated = (
        attentions(lab.tiny("step3p5", each)[0])[0] for each in ({}, {"query_pre_attn_scalar": 144.0})
    )
    # configuration_step3p7.py: the width of a head, where the config is silent.
    assert plain.scale == pytest.approx(plain.head_dim**-0.5)
    assert stated.scale == pytest.approx(1 / 12)


@pytest.mark.report("QKN-01")
def test_norms_over_the_whole_projection_have_the_width_of_all_heads(lab: Any) -> None:
    attention = attentions(lab.tiny("olmoe", {"num_attention_heads": 4, "num_key_value_heads": 2})[0])[0]
    width = attention.head_dim
    assert attention.q_norm.weight.shape == (4 * width,)
    assert attention.k_norm.weight.shape == (2 * width,)


@pytest.mark.report("QKN-03")
@pytest.mark.parametrize("name", ["llama4", "llama4_text"])
def test_layers_without_rotation_have_no_norm_of_queries_and_keys(name: str, lab: Any) -> None:
    found = attentions(lab.tiny(name)[0])
    turned = [each for each in found if each._rope is not None]
    still = [each for each in found if each._rope is None]
    assert turned
    assert still
    assert all(each._spec.qk_norm.enabled and each._spec.qk_norm.after_rope for each in turned)
    assert all(each._spec.qk_norm is None for each in still)


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "proportional": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16},
}


@pytest.mark.report("CCH-08")
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_of_a_batch_turn_by_their_own_positions(kind: str, style: Any, tokens: int) -> None:
    """Also where one is past the original context and the other is not."""
    plan = RopePlan(style, 10000.0, kind, 1.0, None, ROPES[kind], 16)
    rope = Rope(plan, 16, 16)
    x = mx.random.normal((2, 4, tokens, 16))
    for offsets in ([3, 9], [3, 40], [21, 40]):
        both = rope(x, mx.array(offsets))
        for row, offset in enumerate(offsets):
            alone = rope(x[row : row + 1], offset)
            assert float(mx.abs(both[row : row + 1] - alone).max()) < 1e-5


def test_rotations_can_be_copied_with_their_model(lab: Any) -> None:
    model, _ = lab.tiny("mixtral")
    twin = copy.deepcopy(model)
    assert mx.array_equal(twin(lab.ids), model(lab.ids)).item()
