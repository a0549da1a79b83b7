"""kv_b_proj and its two halves: carried there and back, quantised too, refused where they do not fit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_experts.engine.weights.kv_absorb import make_absorb
from mlx_experts.engine.weights.tensor_tree import Tree
from mlx_experts.registry.errors import QuantizationError, SpecError, TensorError

H, N, V, C = 2, 64, 32, 64
BASE = "model.layers.0.attn"
TREE = Tree({f"{BASE}.embed_q.weight": (H, C, N), f"{BASE}.unembed_out.weight": (H, V, C)}, 1, {})
OPERATION = make_absorb(source="model.layers.{layer}.attn.kv_b_proj", options={})


def matrix() -> mx.array:
    return mx.random.normal((H * (N + V), C), key=mx.random.key(0))


def packed(mode: str, bits: int, group: int) -> dict[str, mx.array]:
    parts = mx.quantize(matrix(), group_size=group, bits=bits, mode=mode)
    return {f"{BASE}.kv_b_proj.{p}": v for p, v in zip(("weight", "scales", "biases"), parts, strict=False)}


def test_each_head_gives_a_turned_key_part_and_a_value_part() -> None:
    tensors = {f"{BASE}.kv_b_proj.weight": matrix()}
    assert OPERATION.forward(tensors, TREE)
    rows = matrix().reshape(H, N + V, C)
    assert set(tensors) == set(TREE.shapes)
    assert mx.array_equal(tensors[f"{BASE}.embed_q.weight"], rows[:, :N].swapaxes(1, 2))
    assert mx.array_equal(tensors[f"{BASE}.unembed_out.weight"], rows[:, N:])


def test_full_precision_comes_back_as_it_was() -> None:
    tensors = {f"{BASE}.kv_b_proj.weight": matrix()}
    OPERATION.forward(tensors, TREE)
    OPERATION.backward(tensors, TREE)
    assert list(tensors) == [f"{BASE}.kv_b_proj.weight"]
    assert mx.array_equal(tensors[f"{BASE}.kv_b_proj.weight"], matrix())


def test_nothing_happens_to_a_checkpoint_that_holds_the_two_parts() -> None:
    tensors = {name: mx.zeros(shape) for name, shape in TREE.shapes.items()}
    assert not OPERATION.forward(tensors, TREE)
    assert set(tensors) == set(TREE.shapes)


@pytest.mark.parametrize(
    ("mode", "bits", "group"), [("affine", 4, 32), ("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]
)
def test_quantised_planes_keep_their_format_and_nearly_their_values(mode: str, bits: int, group: int) -> None:
    tensors = packed(mode, bits, group)
    whole = mx.dequantize(*tensors.values(), group_size=group, bits=bits, mode=mode)
    OPERATION.forward(tensors, TREE)
    rows = whole.reshape(H, N + V, C)
    for leaf, want in (("embed_q", rows[:, :N].swapaxes(1, 2)), ("unembed_out", rows[:, N:])):
        planes = [tensors.get(f"{BASE}.{leaf}.{plane}") for plane in ("weight", "scales", "biases")]
        got = mx.dequantize(*planes, group_size=group, bits=bits, mode=mode)
        assert got.shape == want.shape
        # The parts are rounded a second time, the key part in groups of another direction.
        assert mx.abs(got - want).mean().item() < (0.15 if bits == 4 else 0.03)


def test_quantised_parts_stay_as_they_are_on_the_way_back() -> None:
    tensors = packed("affine", 4, 32)
    OPERATION.forward(tensors, TREE)
    carried = dict(tensors)
    OPERATION.backward(tensors, TREE)
    assert tensors.keys() == carried.keys()


def test_a_key_part_that_groups_do_not_fit_is_left_unpacked() -> None:
    narrow = Tree({f"{BASE}.embed_q.weight": (4, C, 16), f"{BASE}.unembed_out.weight": (4, V, C)}, 1, {})
    tensors = packed("affine", 4, 32)
    OPERATION.forward(tensors, narrow)
    assert tensors[f"{BASE}.embed_q.weight"].shape == (4, C, 16)
    assert f"{BASE}.embed_q.scales" not in tensors
    assert f"{BASE}.unembed_out.scales" in tensors


def test_a_matrix_of_another_shape_is_refused() -> None:
    with pytest.raises(TensorError, match="does not fit the heads") as caught:
        OPERATION.forward({f"{BASE}.kv_b_proj.weight": mx.zeros((7, C))}, TREE)
    assert "[192, 64]" in str(caught.value)


def test_planes_of_no_format_are_refused() -> None:
    tensors = packed("affine", 4, 32)
    tensors[f"{BASE}.kv_b_proj.scales"] = mx.zeros((H * (N + V), 5))
    with pytest.raises(QuantizationError, match="fit no format"):
        OPERATION.forward(tensors, TREE)


def test_a_layer_without_latent_attention_is_named() -> None:
    with pytest.raises(TensorError, match=r"where the model has none[\s\S]*layers\.0\.attn\.kv_b_proj"):
        OPERATION.forward({f"{BASE}.kv_b_proj.weight": matrix()}, Tree({}, 1, {}))


def test_the_operation_takes_no_options() -> None:
    options: dict[str, Any] = {"heads": 3}
    with pytest.raises(SpecError, match="absorb_kv"):
        make_absorb(source="x", options=options)
