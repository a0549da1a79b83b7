"""Every foreign encoding against an unpacking written here from the formats' descriptions, in numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_experts.engine.encodings import decode_encodings
from mlx_experts.engine.fp8 import fp8_values, scale_values
from mlx_experts.registry.encoding_kinds import Plane
from mlx_experts.registry.encodings import plan_encodings
from mlx_experts.registry.errors import QuantizationError, RegistryError

GATE = "model.layers.0.mlp.experts.3.gate_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
RNG = np.random.default_rng(7)


def minifloat(byte: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A finite value of an 8-bit float."""
    sign = -1.0 if byte >> 7 else 1.0
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


E4M3 = np.array([minifloat(b, 4, 3, 7) for b in range(256)], np.float32)
E5M2 = np.array([minifloat(b, 5, 2, 15) for b in range(256)], np.float32)


def fp8_bytes(*shape: int) -> np.ndarray:
    """Random finite e4m3 bytes."""
    return RNG.choice([b for b in range(256) if b & 0x7F != 0x7F], shape).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned values packed in 32-bit words from the lowest bits up, along the last axis."""
    each = 32 // bits
    cut = values.reshape(*values.shape[:-1], -1, each).astype(np.uint32)
    return (cut << (np.arange(each, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """e2m1 values of bytes, the low half first."""
    return np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(*packed.shape[:-1], -1)


def decode(tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None, **options: Any) -> Any:
    arrays = {name: mx.array(value) for name, value in tensors.items()}
    options.setdefault("dense", mx.float32)
    return decode_encodings(arrays, {"quantization_config": config}, **options)


def unpacked(decoded: Any, module: str) -> np.ndarray:
    """The float32 matrix of a module that stayed packed, as MLX reads it."""
    planes = {plane: decoded.weights.get(f"{module}.{plane}") for plane in ("weight", "scales", "biases")}
    entry = {key: decoded.quantization[key] for key in ("group_size", "bits", "mode")}
    entry.update(decoded.quantization.get(module, {}))
    whole = decoded.weights.get(f"{module}.global_scale")
    return np.array(mx.dequantize(*planes.values(), **entry, global_scale=whole, dtype=mx.float32))


def refused(tensors: dict[str, np.ndarray], config: Any = None, **options: Any) -> QuantizationError:
    before = dict(tensors)
    with pytest.raises(QuantizationError) as caught:
        decode(tensors, config, **options)
    assert tensors == before
    return caught.value


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (64, 192), (300, 129), (1, 5)])
def test_fp8_blocks_are_multiplied_also_where_the_last_block_is_cut(rows, columns):
    weight, scale = fp8_bytes(rows, columns), scales(-(-rows // 128), -(-columns // 128))
    whole = np.kron(scale, np.ones((128, 128), np.float32))[:rows, :columns]
    decoded = decode({f"{GATE}.weight": weight, f"{GATE}.weight_scale_inv": scale}, FP8)
    assert list(decoded.weights) == [f"{GATE}.weight"]
    assert decoded.quantization is None
    np.testing.assert_array_equal(np.array(decoded.weights[f"{GATE}.weight"]), E4M3[weight] * whole)


def test_other_block_sizes_are_followed():
    weight, scale = fp8_bytes(6, 10), scales(3, 2)
    whole = np.kron(scale, np.ones((2, 8), np.float32))[:, :10]
    tensors = {f"{GATE}.weight": weight, f"{GATE}.weight_scale_inv": scale}
    decoded = decode(tensors, {"quant_method": "fp8", "weight_block_size": [2, 8]})
    np.testing.assert_array_equal(np.array(decoded.weights[f"{GATE}.weight"]), E4M3[weight] * whole)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (6, 1)])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fp8_scales_of_a_tensor_or_of_rows_broadcast(shape, suffix):
    weight, scale = fp8_bytes(6, 10), scales(*shape)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    decoded = decode({f"{GATE}.weight": weight, f"{GATE}.weight{suffix}": scale}, config)
    whole = scale.reshape(6, 1) if scale.size == 6 else scale.reshape(1, 1)
    np.testing.assert_array_equal(np.array(decoded.weights[f"{GATE}.weight"]), E4M3[weight] * whole)


@pytest.mark.parametrize("shape", [(3, 2, 2), (3, 1, 1), (3, 1), (3,), (3, 200), (1,)])
def test_a_stack_of_experts_keeps_its_name(shape):
    weight, scale = fp8_bytes(3, 200, 136), scales(*shape)
    decoded = decode({STACK: weight, f"{STACK}_scale_inv": scale}, FP8)
    if shape == (3, 2, 2):
        whole = np.kron(scale, np.ones((1, 128, 128), np.float32))[:, :200, :136]
    else:
        whole = scale.reshape(*shape, *[1] * (3 - len(shape)))
    np.testing.assert_array_equal(np.array(decoded.weights[STACK]), E4M3[weight] * whole)


def test_e5m2_is_decoded_when_the_header_said_so():
    weight = RNG.integers(0, 0x7C, (4, 8)).astype(np.uint8)
    decoded = decode(
        {f"{GATE}.weight": weight, f"{GATE}.weight_scale": scales(1) * 0 + 2},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        dtypes={f"{GATE}.weight": "F8_E5M2"},
    )
    np.testing.assert_array_equal(np.array(decoded.weights[f"{GATE}.weight"]), E5M2[weight] * 2)


def test_all_fp8_bytes_are_read_as_their_formats_say():
    every = np.arange(256, dtype=np.uint8)
    for dtype, table, special in (("F8_E4M3", E4M3, 0x7F), ("F8_E5M2", E5M2, 0x7C)):
        finite = (every & 0x7F) < special
        values = np.array(fp8_values(mx.array(every), dtype))
        np.testing.assert_array_equal(values[finite], table[finite])
        assert not np.isfinite(values[~finite]).any()
    powers = np.array(scale_values(mx.array(every)))
    np.testing.assert_array_equal(powers[1:255], 2.0 ** (np.arange(1, 255) - 127.0).astype(np.float32))
    assert powers[0] == np.float32(2.0**-127)
    assert np.isnan(powers[255])


def test_power_of_two_scales_of_large_blocks_are_exponents():
    weight, scale = fp8_bytes(130, 256), RNG.integers(120, 130, (2, 2)).astype(np.uint8)
    whole = np.kron(2.0 ** (scale.astype(np.float32) - 127), np.ones((128, 128), np.float32))[:130]
    tensors = {f"{GATE}.weight": weight, f"{GATE}.weight_scale_inv": scale}
    decoded = decode(tensors, {**FP8, "scale_fmt": "ue8m0"})
    np.testing.assert_array_equal(np.array(decoded.weights[f"{GATE}.weight"]), E4M3[weight] * whole)


@pytest.mark.parametrize("dense", [mx.bfloat16, mx.float16, mx.float32])
def test_the_product_is_rounded_once_to_the_wanted_dtype(dense):
    weight, scale = fp8_bytes(8, 8) & 0xBF, np.array([[1.0007]], np.float32)
    decoded = decode({f"{GATE}.weight": weight, f"{GATE}.weight_scale_inv": scale}, FP8, dense=dense)
    found = decoded.weights[f"{GATE}.weight"]
    assert found.dtype == dense
    assert mx.array_equal(found, mx.array(E4M3[weight] * scale).astype(dense))


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


def compressed(bits: int, group: int, kind: str = "int", name: str = "pack-quantized") -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": group, "type": kind, "symmetric": True, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


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


def test_mxfp4_blocks_of_a_stack_become_planes():
    blocks, exponents = RNG.integers(0, 256, (3, 4, 2, 16)), RNG.integers(118, 130, (3, 4, 2))
    tensors = {
        f"{STACK}_blocks": blocks.astype(np.uint8),
        f"{STACK}_scales": exponents.astype(np.uint8),
        f"{STACK}_bias": scales(3, 4),
    }
    decoded = decode(tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert sorted(decoded.weights) == [f"{STACK}.scales", f"{STACK}.weight", f"{STACK}_bias"]
    assert decoded.quantization == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    values = nibbles(blocks.reshape(3, 4, 32)) * np.repeat(2.0 ** (exponents - 127.0), 32, -1)
    np.testing.assert_array_equal(unpacked(decoded, STACK), values.astype(np.float32))


@pytest.mark.parametrize("container", ["bytes", "words"])
def test_packed_mxfp4_becomes_planes(container):
    packed, exponents = RNG.integers(0, 256, (4, 32)).astype(np.uint8), RNG.integers(118, 130, (4, 2))
    tensors = {
        f"{GATE}.weight_packed": packed if container == "bytes" else packed.view(np.int32),
        f"{GATE}.weight_scale": exponents.astype(np.uint8),
    }
    decoded = decode(tensors, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"})
    values = nibbles(packed) * np.repeat(2.0 ** (exponents - 127.0), 32, -1)
    np.testing.assert_array_equal(unpacked(decoded, GATE), values.astype(np.float32))


@pytest.mark.parametrize("form", ["rows", "tiles", "floats"])
def test_mxfp8_stays_packed(form):
    weight, exponents = fp8_bytes(40, 64), RNG.integers(120, 130, (40, 2))
    tensors: dict[str, np.ndarray] = {f"{GATE}.weight": weight}
    config: dict[str, Any] = {"quant_method": "mxfp8"}
    if form == "rows":
        tensors[f"{GATE}.weight_scale_inv"] = exponents.astype(np.uint8)
    else:
        tiles = exponents[:2]
        exponents = np.repeat(tiles, 32, 0)[:40]
        tensors[f"{GATE}.scale"] = tiles.astype(np.uint8)
        config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
        if form == "floats":
            tensors[f"{GATE}.scale"] = (2.0 ** (tiles - 127.0)).astype(np.float32)
    decoded = decode(tensors, config)
    assert decoded.quantization == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    values = E4M3[weight] * np.repeat(2.0 ** (exponents - 127.0), 32, -1)
    np.testing.assert_array_equal(unpacked(decoded, GATE), values.astype(np.float32))


def test_floats_that_are_said_to_be_powers_of_two_must_be():
    tensors = {
        f"{GATE}.weight": fp8_bytes(32, 32),
        f"{GATE}.weight_scale_inv": np.full((1, 1), 3, np.float32),
    }
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    assert "powers of two" in refused(tensors, config).what


@pytest.mark.parametrize("maker", ["modelopt", "compressed-tensors", "no global scale"])
def test_nvfp4_keeps_its_block_and_global_scales(maker):
    packed, block = RNG.integers(0, 256, (4, 32)).astype(np.uint8), fp8_bytes(4, 4) & 0x7F
    whole = np.array([0.037], np.float32)
    tensors = {f"{GATE}.weight_scale": block}
    if maker == "compressed-tensors":
        tensors |= {f"{GATE}.weight_packed": packed, f"{GATE}.weight_global_scale": 1 / whole}
        tensors[f"{GATE}.input_global_scale"] = whole
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    else:
        tensors |= {f"{GATE}.weight": packed, f"{GATE}.input_scale": whole}
        config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        if maker == "modelopt":
            tensors[f"{GATE}.weight_scale_2"] = whole.reshape(())
        else:
            whole = np.ones(1, np.float32)
    decoded = decode(tensors, config)
    assert decoded.quantization == {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    assert "Dropped 1 scales" in decoded.notices[0]
    values = nibbles(packed) * np.repeat(E4M3[block], 16, -1) * whole
    np.testing.assert_allclose(unpacked(decoded, GATE), values, rtol=1e-6)


def test_a_fused_nvfp4_stack_keeps_a_scale_for_each_half():
    packed, block, whole = fp8_bytes(2, 8, 16), fp8_bytes(2, 8, 2) & 0x7F, scales(2, 2)
    tensors = {STACK: packed, f"{STACK}_weight_scale": block, f"{STACK}_weight_scale_2": whole}
    decoded = decode(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    found = decoded.weights[f"{STACK}.global_scale"]
    np.testing.assert_allclose(np.array(found), whole * 2688, rtol=1e-6)
    one = decode({**tensors, f"{STACK}_weight_scale_2": whole[:, 0]}, {"quant_method": "mxfp4"})
    assert one.weights[f"{STACK}.global_scale"].shape == (2,)


def test_a_checkpoint_of_mlx_passes_unchanged():
    weight, scale, bias = mx.quantize(mx.random.normal((8, 64)), 64, 4)
    fp4, exponents = mx.quantize(mx.random.normal((8, 64)), mode="mxfp4")
    arrays = {"a.weight": weight, "a.scales": scale, "a.biases": bias, "b.weight": fp4, "b.scales": exponents}
    arrays["router.per_expert_scale"] = mx.ones(4)
    arrays["norm.scale"] = mx.ones(4)
    entry = {"group_size": 64, "bits": 4, "b": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    decoded = decode_encodings(
        arrays, {"quantization": entry, "quantization_config": {"quant_method": "awq"}}
    )
    assert decoded.weights == arrays
    assert decoded.quantization == entry
    assert decoded.notices == []


def test_planes_that_a_converter_has_already_made_get_the_entry_of_their_method():
    fp4, exponents = mx.quantize(mx.random.normal((8, 64)), mode="mxfp4")
    arrays = {"b.weight": fp4, "b.scales": exponents}
    decoded = decode_encodings(arrays, {"quantization_config": {"quant_method": "mxfp4"}})
    assert decoded.quantization == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    plain = decode_encodings(
        {"b.weight": mx.ones((4, 4))}, {"quantization_config": {"quant_method": "mxfp4"}}
    )
    assert plain.quantization is None


def test_modules_of_other_bits_are_entered_by_path():
    entry = {}
    tensors = {}
    for module, bits in (("a", 4), ("b", 4), ("c", 8)):
        values = RNG.integers(0, 1 << bits, (2, 64))
        tensors[f"{module}.weight_packed"] = words(values, bits).view(np.int32)
        tensors[f"{module}.weight_scale"] = scales(2, 2)
        tensors[f"{module}.weight_shape"] = np.array([2, 64])
    entry = compressed(4, 32)
    entry["config_groups"]["group_1"] = compressed(8, 32)["config_groups"]["group_0"]
    decoded = decode(tensors, {**entry, "format": "mixed-precision"})
    common = {"group_size": 32, "bits": 4, "mode": "affine"}
    assert decoded.quantization == {**common, "c": {**common, "bits": 8}}


def test_scales_of_activations_and_caches_are_dropped_and_counted():
    tensors = {
        f"{GATE}.weight": fp8_bytes(4, 4),
        f"{GATE}.weight_scale": scales(1),
        f"{GATE}.input_scale": scales(1),
        "model.layers.0.self_attn.k_proj.k_scale": scales(1),
        "model.layers.0.self_attn.v_scale": scales(1),
        "model.layers.0.mlp.experts.down_proj_activation_scale": scales(2),
    }
    decoded = decode(tensors, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert list(decoded.weights) == [f"{GATE}.weight"]
    assert decoded.notices[0].startswith("Dropped 4 scales of activations or caches")


def test_such_names_are_kept_where_nothing_is_quantised():
    assert list(decode({"attn.k_scale": scales(1)}).weights) == ["attn.k_scale"]


@pytest.mark.parametrize("config", [None, FP8, {"group_size": 64, "bits": 4}])
def test_bytes_without_their_scale_are_refused_by_name(config):
    error = refused({f"{GATE}.weight": fp8_bytes(4, 4), "a.weight": fp8_bytes(4, 4)}, config)
    assert error.where == "a.weight"
    assert "1 more" in error.found


def test_a_scale_without_its_weight_is_refused_by_name():
    assert refused({f"{GATE}.weight_scale_inv": scales(1, 1)}, FP8).where == f"{GATE}.weight_scale_inv"
    beside_floats = {f"{GATE}.weight": scales(4, 4), f"{GATE}.weight_scale_inv": scales(1, 1)}
    assert refused(beside_floats, FP8).found == "F32 [4, 4]"


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight": fp8_bytes(4, 4), "a.weight_scale": scales(3)},
        {"a.weight": fp8_bytes(4, 4), "a.weight_scale_inv": scales(2, 2)},
        {"a.weight": fp8_bytes(4), "a.weight_scale_inv": scales(1)},
        {"a.weight": fp8_bytes(0, 4), "a.weight_scale_inv": scales(1)},
        {"a.weight": fp8_bytes(4, 64), "a.weight_scale": fp8_bytes(4, 7)},
        {"a.weight": fp8_bytes(4, 64), "a.weight_scale": fp8_bytes(5, 8)},
        {"a.weight": fp8_bytes(4, 4), "a.weight_scale": scales(1), "a.weight_scale_inv": scales(1)},
        {"a.weight_packed": fp8_bytes(4, 32)},
        {"a_blocks": fp8_bytes(2, 4, 2, 16)},
        {"a_blocks": fp8_bytes(2, 4, 2, 16), "a_scales": fp8_bytes(2, 4, 3)},
        {"a.weight_packed": fp8_bytes(4, 32), "a.weight_scale": fp8_bytes(4, 4), "a.weight": scales(4, 64)},
        {
            "a.weight_packed": fp8_bytes(4, 32),
            "a.weight_scale": fp8_bytes(4, 4),
            "a.weight_global_scale": scales(2),
        },
        {
            "a.weight_packed": fp8_bytes(4, 32),
            "a.weight_scale": fp8_bytes(4, 2),
            "a.weight_scale_2": scales(1),
        },
        {
            "a.weight_packed": fp8_bytes(4, 32).view(np.int32),
            "a.weight_scale": scales(4, 2),
            "a.weight_shape": np.array([4, 65]),
        },
        {
            "a.weight_packed": fp8_bytes(4, 32).view(np.int32),
            "a.weight_scale": scales(4, 2),
            "a.weight_shape": np.array([4, -64]),
        },
        {
            "a.weight_packed": fp8_bytes(4, 32).view(np.int32),
            "a.weight_scale": scales(4, 2),
            "a.weight_g_idx": np.arange(64, dtype=np.int32),
        },
        {
            "a.weight_packed": fp8_bytes(4, 32).view(np.int32),
            "a.weight_scale": scales(4, 2),
            "a.weight_zero_point": fp8_bytes(4, 8).view(np.int32),
        },
        {"a.weight_packed": fp8_bytes(4, 32).view(np.int32), "a.weight_scale": scales(4, 2)},
        {"a.weight": fp8_bytes(4, 98).view(np.int8), "a.weight_scale": scales(4, 3)},
    ],
)
def test_planes_that_do_not_fit_are_refused_with_the_tensor_named(tensors):
    error = refused(tensors, {"quant_method": "compressed-tensors", "format": "mixed-precision"})
    assert error.where in tensors


def test_an_incomplete_module_leaves_every_array_where_it_was():
    arrays = {
        "a.weight": mx.array(fp8_bytes(4, 4)),
        "a.weight_scale_inv": mx.array(scales(1, 1)),
        "b.weight": mx.array(fp8_bytes(4, 4)),
    }
    names = set(arrays)
    with pytest.raises(QuantizationError):
        decode_encodings(arrays, {"quantization_config": FP8})
    assert set(arrays) == names


def test_the_plan_foretells_what_decoding_gives():
    tensors = {
        f"{GATE}.weight": fp8_bytes(40, 64),
        f"{GATE}.weight_scale_inv": scales(1, 1),
        f"{STACK}_blocks": fp8_bytes(3, 4, 2, 16),
        f"{STACK}_scales": fp8_bytes(3, 4, 2),
        "b.weight_packed": fp8_bytes(4, 32).view(np.int32),
        "b.weight_scale": scales(4, 2),
        "b.weight_shape": np.array([4, 64]),
        "c.weight_packed": fp8_bytes(4, 32),
        "c.weight_scale": fp8_bytes(4, 4),
        "c.weight_global_scale": scales(1),
        "d.input_scale": scales(1),
        "norm.weight": scales(8),
    }
    decoded = decode(tensors)
    spelled = {mx.float32: "F32", mx.uint32: "U32", mx.uint8: "U8"}
    dtypes = {np.uint8: "U8", np.int32: "I32", np.float32: "F32", np.int64: "I64"}
    headers = {name: Plane(dtypes[array.dtype.type], array.shape) for name, array in tensors.items()}
    plan = plan_encodings(headers, None, widths={"b.weight_shape": 64}, dense="F32")
    assert plan.apply(headers) == {
        name: Plane(spelled[array.dtype], tuple(array.shape)) for name, array in decoded.weights.items()
    }


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "quant_method": st.sampled_from(["fp8", "compressed-tensors", "modelopt", "mxfp4", "awq", "gptq"])
        | JUNK,
        "format": st.sampled_from(["pack-quantized", "mixed-precision", "marlin-24"]) | JUNK,
        "config_groups": st.dictionaries(
            st.text(max_size=2),
            st.fixed_dictionaries(
                {},
                optional={
                    "weights": st.fixed_dictionaries(
                        {},
                        optional={
                            "num_bits": st.integers(-1, 9) | JUNK,
                            "group_size": st.integers(-2, 200) | JUNK,
                            "type": st.sampled_from(["int", "float"]) | JUNK,
                            "block_structure": JUNK,
                        },
                    )
                    | JUNK,
                    "format": JUNK,
                },
            )
            | JUNK,
            max_size=2,
        )
        | JUNK,
        "weight_block_size": st.lists(st.integers(-1, 200), min_size=2, max_size=2) | JUNK,
        "scale_fmt": st.just("ue8m0") | JUNK,
        "quant_algo": st.sampled_from(["NVFP4", "FP8"]) | JUNK,
        "quantization": JUNK,
        "bits": JUNK,
        "group_size": JUNK,
    },
)
SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)
ENDINGS = (
    "_blocks _scales _scale_inv .scale .scales .weight .weight_scale .weight_scale_inv .weight_scale_2"
    " .weight_packed .weight_shape .weight_global_scale .weight_zero_point .qweight .qzeros .g_idx"
)
NAMES = st.sampled_from(["a", *(f"a{ending}" for ending in ENDINGS.split())])
DTYPES = st.sampled_from(
    ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8", "I32", "U32", "BF16", "F32", "I64"]
)


@given(
    tensors=st.dictionaries(NAMES, st.builds(Plane, DTYPES, SHAPES), max_size=4),
    entry=ENTRIES,
    widths=st.dictionaries(st.just("a.weight_shape"), st.integers(-5, 200), max_size=1),
)
def test_any_entry_and_any_planes_are_planned_or_refused(tensors, entry, widths):
    try:
        plan = plan_encodings(tensors, entry, widths=widths)
    except RegistryError as error:
        result, message = tensors, error.render()
    else:
        result, message = plan.apply(tensors), "planned"
    assert message
    assert len(message) < 2000
    assert set(result) <= set(tensors) | {"a.weight", "a.scales", "a.biases", "a.global_scale", "a"}
