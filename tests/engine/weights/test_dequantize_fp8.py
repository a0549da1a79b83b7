"""Eight-bit floats of other libraries against an unpacking in numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from foreign_planes import E4M3, E5M2, FP8, GATE, RNG, STACK, decode, fp8_bytes, scales

from mlx_experts.engine.weights.fp8 import fp8_values, scale_values
from mlx_experts.registry.errors import QuantizationError


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


def test_a_scale_that_has_a_scale_itself_is_refused():
    names = [f"{GATE}.weight", f"{GATE}.weight_scale_inv", f"{GATE}.weight_scale_inv_scale_inv"]
    with pytest.raises(QuantizationError, match=r"part of two encoded modules"):
        decode({n: fp8_bytes(*shape) for n, shape in zip(names, [(4, 4), (1, 1), (1, 1)], strict=True)}, FP8)


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
