"""Microscaled floats of other libraries, which stay packed, against an unpacking in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foreign_planes import E4M3, GATE, RNG, STACK, decode, fp8_bytes, nibbles, refused, scales, unpacked


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


@pytest.mark.parametrize("maker", ["modelopt", "compressed-tensors"])
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
        tensors[f"{GATE}.weight_scale_2"] = whole.reshape(())
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
