"""What decoding keeps, drops and refuses, whichever encoding it is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from foreign_encoders import compressed
from foreign_planes import FP8, GATE, RNG, STACK, decode, fp8_bytes, refused, scales, words
from hypothesis import given
from hypothesis import strategies as st

from mlx_experts.engine.weights.dequantize import decode_encodings
from mlx_experts.registry.errors import QuantizationError, RegistryError
from mlx_experts.registry.quantization.detect import plan_encodings
from mlx_experts.registry.quantization.formats import TensorForm


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
    with pytest.raises(QuantizationError, match=r"b\.weight"):
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
    headers = {name: TensorForm(dtypes[array.dtype.type], array.shape) for name, array in tensors.items()}
    plan = plan_encodings(headers, None, widths={"b.weight_shape": 64}, dense="F32")
    assert plan.apply(headers) == {
        name: TensorForm(spelled[array.dtype], tuple(array.shape)) for name, array in decoded.weights.items()
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
    tensors=st.dictionaries(NAMES, st.builds(TensorForm, DTYPES, SHAPES), max_size=4),
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
