"""Lightning attention's recurrence, against its definition token by token."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import bailing_moe_linear
from mlx_lm.utils import save_config, save_model

from mlx_experts import load_model
from mlx_experts.engine.layers.mixers import lightning
from mlx_experts.engine.layers.mixers.lightning import decayed_attention, head_rates

RATES = mx.array([0.5, 0.06])


def by_token(q: mx.array, k: mx.array, v: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    outputs = []
    for t in range(q.shape[2]):
        state = mx.exp(-RATES)[:, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, None, :] @ state)[:, :, 0])
    return mx.stack(outputs, axis=2), state


def drawn(rows: int, length: int) -> tuple[mx.array, ...]:
    mx.random.seed(2)
    return tuple(mx.random.normal((rows, 2, length, 4)) for _ in range(3))


@pytest.mark.parametrize("length", [1, 3, 5, 8, 11])
def test_blocks_give_what_the_recurrence_gives(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "BLOCK", 4)
    q, k, v = drawn(2, length)
    state = mx.random.normal((2, 2, 4, 4))
    got, last = decayed_attention(q, k, v, RATES, state, None)
    want, end = by_token(q, k, v, state)
    assert mx.allclose(got, want, atol=1e-4)
    assert mx.allclose(last, end, atol=1e-4)


@pytest.mark.parametrize("left", [True, False])
def test_padding_neither_adds_nor_decays(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "BLOCK", 4)
    q, k, v = drawn(1, 9)
    real = slice(2, 9) if left else slice(0, 7)
    mask = mx.zeros((1, 9), dtype=mx.bool_)
    mask[:, real] = True
    state = mx.random.normal((1, 2, 4, 4))
    got, last = decayed_attention(q, k, v, RATES, state, mask)
    want, end = by_token(q[:, :, real], k[:, :, real], v[:, :, real], state)
    assert mx.allclose(got[:, :, real], want, atol=1e-4)
    assert mx.allclose(last, end, atol=1e-4)


def test_rates_of_a_power_of_two_are_the_same_by_either_rule() -> None:
    assert head_rates(8, alibi=True) == head_rates(8, alibi=False)
    assert head_rates(8, alibi=False)[-1] == 2.0**-8


def test_alibi_fills_up_with_every_second_rate_of_the_next_power() -> None:
    assert head_rates(6, alibi=True) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert head_rates(6, alibi=False)[1] == pytest.approx(2.0 ** (-8 / 3))


def test_the_first_layer_forgets_faster_where_layers_are_counted_from_the_second(tmp_path: Path) -> None:
    """mlx-lm gives the first layer the second's rates; with the authors' rates its logits are ours."""
    config = {
        "model_type": "bailing_moe_linear",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-4,
        "rope_theta": 5000.0,
        "vocab_size": 128,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "group_norm_size": 3,
        "use_bias": True,
        "use_qkv_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_traditional": True,
    }
    mx.random.seed(5)
    theirs = bailing_moe_linear.Model(bailing_moe_linear.ModelArgs.from_dict(config))
    drawn = [(k, v + 0.1 * mx.random.normal(v.shape)) for k, v in tree_flatten(theirs.parameters())]
    theirs.update(tree_unflatten(drawn))
    theirs.eval()
    save_model(tmp_path, theirs, donate_model=False)
    save_config(config, tmp_path / "config.json")
    ours, _ = load_model(tmp_path)
    ids = mx.array([[3, 17, 42, 99, 5, 64, 23]])
    assert mx.abs(ours(ids) - theirs(ids)).max() > 1e-4
    first = theirs.model.layers[0].attention
    first._slope = -mx.array(head_rates(3, alibi=True)) * (1 + 1 / 4 + 1e-5)
    assert mx.abs(ours(ids) - theirs(ids)).max() < 1e-5 * mx.abs(ours(ids)).max()
