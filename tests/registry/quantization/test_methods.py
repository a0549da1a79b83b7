"""What a config says about its quantisation, and the methods that are refused by name."""

from __future__ import annotations

import pytest

from mlx_experts.registry.errors import QuantizationError
from mlx_experts.registry.quantization.methods import Declared, mlx_group_size, read_declared


def refused(entry):
    with pytest.raises(QuantizationError) as caught:
        read_declared(entry)
    return caught.value


@pytest.mark.parametrize("entry", [None, {}])
def test_no_entry_declares_nothing(entry):
    assert read_declared(entry) == Declared("none")


def test_an_entry_of_mlx_is_kept_whole():
    entry = {"group_size": 64, "bits": 4, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}
    assert read_declared(entry) == Declared("mlx", entry)


def test_fp8_declares_its_blocks():
    entry = {"quant_method": "fp8", "weight_block_size": [128, 64], "scale_fmt": "ue8m0"}
    assert read_declared(entry) == Declared("fp8", block=(128, 64), power_of_two=True)
    assert read_declared({"quant_method": "fp8", "activation_scheme": "static"}) == Declared("fp8")


def test_awq_and_gptq_declare_their_integers_and_their_arrangement():
    assert read_declared({"quant_method": "gptq", "bits": 8, "group_size": -1}) == Declared(
        "gptq", integers=((8, 0),), zero_offset=1
    )
    assert read_declared({"quant_method": "awq", "version": "GEMM"}) == Declared("awq", integers=((4, 128),))
    assert refused({"quant_method": "awq", "version": "gemv"}).found == "'gemv'"
    assert refused({"quant_method": "gptq", "checkpoint_format": "marlin"}).found == "'marlin'"


def test_compressed_tensors_declares_each_group_of_integers():
    weights = [
        {"num_bits": 4, "group_size": 32, "type": "int"},
        {"num_bits": 8, "group_size": None, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "block_structure": [128, 128]},
    ]
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    declared = read_declared(
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    )
    assert declared.integers == ((4, 32), (8, 0))
    assert declared.block == (128, 128)
    assert declared.entry == {"group_size": 32, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize(
    ("entry", "mode"),
    [
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "mxfp8"}, "mxfp8"),
    ],
)
def test_formats_that_mlx_has_declare_its_entry(entry, mode):
    declared = read_declared(entry).entry
    assert declared is not None
    assert declared["mode"] == mode


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "aqlm", "", 4, ["fp8"]])
def test_other_methods_are_refused_by_name(method):
    error = refused({"quant_method": method})
    assert error.where.endswith("quant_method")
    assert str(method) in error.found
    assert "fp8" in error.expected


@pytest.mark.parametrize("name", ["marlin-24", "sparse-24-bitmask", 4])
@pytest.mark.parametrize("nested", [False, True])
def test_other_compressed_formats_are_refused_by_name(name, nested):
    entry = {"quant_method": "compressed-tensors", "format": name}
    if nested:
        entry = {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"g": {"format": name}},
        }
    error = refused(entry)
    assert str(name) in error.found
    assert error.where.endswith("config_groups.g.format" if nested else ".format")


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", None, 8])
def test_other_modelopt_algorithms_are_refused_by_name(algorithm):
    assert str(algorithm) in refused({"quant_method": "modelopt", "quant_algo": algorithm}).found


@pytest.mark.parametrize("block", [[128], [0, 128], [128.0, 128], ["128", 128], [True, 1], 128, [2**40, 1]])
def test_block_sizes_that_cannot_be_are_refused(block):
    assert refused({"quant_method": "fp8", "weight_block_size": block}).where.endswith("weight_block_size")


@pytest.mark.parametrize(
    "groups",
    [
        [],
        {"g": 4},
        {"g": {"weights": 4}},
        {"g": {"weights": {"num_bits": 0}}},
        {"g": {"weights": {"num_bits": None}}},
        {"g": {"weights": {"num_bits": 4, "group_size": -2}}},
        {"g": {"weights": {"num_bits": 4, "group_size": "32"}}},
    ],
)
def test_config_groups_that_cannot_be_are_refused(groups):
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups or 5}
    assert "config_groups" in refused(entry).where


def test_group_sizes_are_cut_into_those_of_mlx():
    sizes = {0: None, 16: None, 32: 32, 48: None, 64: 64, 96: 32, 128: 128, 192: 64, 4096: 128}
    assert {size: mlx_group_size(size) for size in sizes} == sizes
