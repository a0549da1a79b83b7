"""Packed, plain and turned integers of other libraries against an unpacking in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from foreign_encoders import compressed
from foreign_planes import GATE, RNG, STACK, decode, refused, scales, unpacked, words


@pytest.mark.parametrize(
    ("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128), (2, 64), (4, 256)]
)
def test_packed_integers_become_affine_planes(bits, group):
    values = RNG.integers(-(1 << bits - 1), 1 << bits - 1, (6, 256))
    scale = scales(6, 256 // group)
    tensors = {
        f"{GATE}.weight_packed": words(values + (1 << bits - 1), bits).view(np.int32),
        f"{GATE}.weight_scale": scale,
        f"{GATE}.weight_shape": np.array([6, 256]),
    }
    config = compressed(bits, group)
    decoded = decode(tensors, config)
    assert decoded.notices == []
    assert decoded.quantization == {"group_size": min(group, 128), "bits": bits, "mode": "affine"}
    np.testing.assert_allclose(
        unpacked(decoded, GATE), values * np.repeat(scale, group, 1), rtol=0, atol=bits * 2e-5
    )
    assert {"biases", "scales", "weight"} == {name.rpartition(".")[2] for name in decoded.weights}


def test_a_scale_for_each_row_is_cut_into_groups_that_mlx_has():
    values, scale = RNG.integers(-8, 8, (4, 192)), scales(4, 1)
    tensors = {f"{GATE}.weight_packed": words(values + 8, 4).view(np.int32), f"{GATE}.weight_scale": scale}
    decoded = decode(tensors, compressed(4, -1))
    assert decoded.quantization["group_size"] == 64
    np.testing.assert_allclose(unpacked(decoded, GATE), values * scale, atol=2e-5)


def test_bits_come_from_the_weight_shape_and_a_config_that_differs_gets_a_notice():
    values, scale = RNG.integers(-128, 128, (4, 128)), scales(4, 1)
    tensors = {
        f"{GATE}.weight_packed": words(values + 128, 8).view(np.int32),
        f"{GATE}.weight_scale": scale,
        f"{GATE}.weight_shape": np.array([4, 128]),
    }
    decoded = decode(tensors, compressed(4, 64))
    said = "the config says 4-bit in groups of 64, the tensors are 8-bit in groups of 128"
    assert decoded.notices == [f"{said}; the tensors are right: {GATE}"]
    np.testing.assert_allclose(unpacked(decoded, GATE), values * scale, atol=1e-4)


def test_a_group_size_that_mlx_lacks_is_refused_not_computed_as_another():
    values = RNG.integers(-8, 8, (4, 96))
    tensors = {
        f"{GATE}.weight_packed": words(values + 8, 4).view(np.int32),
        f"{GATE}.weight_scale": scales(4, 2),
    }
    error = refused(tensors, compressed(4, 48))
    assert error.where == f"{GATE}.weight_packed"
    assert "96 columns in 2 groups" in error.found


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_unpacked_along_the_rows(bits):
    values, zero = RNG.integers(0, 1 << bits, (2, 13, 64)), RNG.integers(0, 1 << bits, (2, 13, 2))
    scale, padded = scales(2, 13, 2), np.zeros((2, 16, 2), int)
    padded[:, :13] = zero
    tensors = {
        f"{STACK}_packed": words(values, bits).view(np.int32),
        f"{STACK}_weight_scale": scale,
        f"{STACK}_zero_point": words(padded.swapaxes(1, 2), bits).swapaxes(1, 2).view(np.int32),
    }
    expected = (values - np.repeat(zero, 32, 2)) * np.repeat(scale, 32, 2)
    np.testing.assert_allclose(unpacked(decode(tensors, compressed(bits, 32)), STACK), expected, atol=2e-4)


@pytest.mark.parametrize("zero", [False, True])
def test_int8_weights_become_affine_planes(zero):
    values, scale = RNG.integers(-128, 128, (5, 64)).astype(np.int8), scales(5, 1)
    tensors = {f"{GATE}.weight": values, f"{GATE}.weight_scale": scale}
    expected = values.astype(np.float32)
    if zero:
        tensors[f"{GATE}.weight_zero_point"] = RNG.integers(-128, 128, (5, 1)).astype(np.int8)
        expected = expected - tensors[f"{GATE}.weight_zero_point"]
    decoded = decode(tensors, compressed(8, -1, name="int-quantized"))
    assert decoded.notices == []
    np.testing.assert_allclose(unpacked(decoded, GATE), expected * scale, atol=1e-4)


def turned(values: np.ndarray, zero: np.ndarray, bits: int, offset: int) -> dict[str, np.ndarray]:
    """GPTQ's planes of values [C, R] and zero points [G, R]."""
    return {
        f"{GATE}.qweight": words(values.T, bits).T.view(np.int32).copy(),
        f"{GATE}.qzeros": words(zero - offset, bits).view(np.int32),
    }


@pytest.mark.parametrize(("bits", "version", "offset"), [(4, None, 1), (4, "gptq_v2", 0), (8, "gptq", 1)])
@pytest.mark.parametrize("group", [32, 192])
def test_gptq_is_turned_round(bits, version, offset, group):
    values, zero = RNG.integers(0, 1 << bits, (192, 16)), RNG.integers(1, 1 << bits, (192 // group, 16))
    scale = scales(192 // group, 16)
    tensors = turned(values, zero, bits, offset)
    tensors |= {f"{GATE}.scales": scale, f"{GATE}.g_idx": np.arange(192, dtype=np.int32) // group}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group if group < 192 else -1}
    decoded = decode(tensors, config if version is None else {**config, "checkpoint_format": version})
    assert decoded.notices == []
    expected = (values - np.repeat(zero, group, 0)) * np.repeat(scale, group, 0)
    np.testing.assert_allclose(unpacked(decoded, GATE), expected.T, atol=2e-4)
    assert sorted(decoded.weights) == [f"{GATE}.biases", f"{GATE}.scales", f"{GATE}.weight"]


def test_gptq_groups_out_of_order_are_refused():
    tensors = turned(RNG.integers(0, 16, (64, 16)), RNG.integers(1, 16, (2, 16)), 4, 1)
    tensors |= {f"{GATE}.scales": scales(2, 16), f"{GATE}.g_idx": np.arange(64, dtype=np.int32) % 2}
    assert refused(tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32}).where == f"{GATE}.g_idx"


def awq_words(values: np.ndarray) -> np.ndarray:
    """AWQ's words: of every eight neighbours the even ones first."""
    order = values.reshape(values.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return words(order.reshape(values.shape), 4).view(np.int32)


def test_awq_is_turned_round_and_put_in_order():
    values, zero, scale = RNG.integers(0, 16, (128, 24)), RNG.integers(0, 16, (2, 24)), scales(2, 24)
    tensors = {
        f"{GATE}.qweight": awq_words(values),
        f"{GATE}.qzeros": awq_words(zero),
        f"{GATE}.scales": scale,
    }
    decoded = decode(tensors, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64})
    assert decoded.quantization == {"group_size": 64, "bits": 4, "mode": "affine"}
    expected = (values - np.repeat(zero, 64, 0)) * np.repeat(scale, 64, 0)
    np.testing.assert_allclose(unpacked(decoded, GATE), expected.T, atol=2e-5)


@pytest.mark.parametrize("lost", ["qzeros", "scales"])
def test_a_turned_weight_without_a_companion_is_refused(lost):
    tensors = turned(RNG.integers(0, 16, (64, 16)), RNG.integers(1, 16, (2, 16)), 4, 1)
    tensors[f"{GATE}.scales"] = scales(2, 16)
    del tensors[f"{GATE}.{lost}"]
    assert refused(tensors, {"quant_method": "gptq"}).where == f"{GATE}.qweight"
