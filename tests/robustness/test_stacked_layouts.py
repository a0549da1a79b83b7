"""Fused and turned stacks, block scales, prediction heads: what shapes alone do not tell is declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import Model
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.weights.dequantize import decode_encodings
from mlx_experts.registry.errors import QuantizationError, TensorError
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.checkpoint import PerExpert, Stacked

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def layouts_of(kind: type) -> list[tuple[str, int]]:
    found = [(name, i, e) for name in FAMILIES for i, e in enumerate(catalog().load(name).expert_layouts)]
    return [(name, i) for name, i, layout in found if isinstance(layout, kind)]


PER_EXPERT = layouts_of(PerExpert)
TURNED = [(n, i) for n, i in layouts_of(Stacked) if catalog().load(n).expert_layouts[i].transposed]


def fp8(weight: mx.array, number: int) -> tuple[dict[str, mx.array], mx.array]:
    """Bytes, the scale of each 128 × 128 block, and the float32 values that they stand for."""
    rows, columns = weight.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    scale = mx.random.uniform(0.001, 0.004, blocks, key=mx.random.key(number))
    whole = mx.repeat(mx.repeat(scale, 128, 0), 128, 1)[:rows, :columns]
    stored = mx.to_fp8(weight / whole)
    return {"weight": stored, "weight_scale_inv": scale}, mx.from_fp8(stored, mx.float32) * whole


def encode(tensors: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Every projection in fp8, an expert's by whatever name, with a scale of its input beside it."""
    stored, values = dict(tensors), dict(tensors)
    for number, (name, value) in enumerate(tensors.items()):
        is_projection = name.endswith("_proj.weight") or (".experts." in name and name.endswith(".weight"))
        if is_projection and value.ndim == 2:
            planes, values[name] = fp8(value, number)
            base = name.removesuffix("weight")
            stored |= {f"{base}{plane}": array for plane, array in planes.items()}
            stored[f"{base}activation_scale"] = stored[f"{base}input_scale"] = mx.array(1.0)
    return stored, values


@pytest.mark.report("LAY-03")
@pytest.mark.parametrize(("name", "index"), PER_EXPERT)
def test_fp8_experts_with_block_scales_are_decoded_before_they_are_stacked(
    name: str, index: int, lab: Any
) -> None:
    model, _ = lab.tiny(name)
    stored, values = encode(model.converter.export(lab.parameters(model), index))
    kept, _ = model.converter.ignore(stored)
    decoded = decode_encodings(kept, FP8, dense=mx.float32)
    want = model.convert(values).tensors
    got = model.convert(decoded.weights).tensors
    assert lab.same(got, want) == []


@pytest.mark.report("LAY-03")
@pytest.mark.parametrize("width", [128, 192])
def test_block_scales_hold_where_a_width_is_no_multiple_of_the_block(
    width: int, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny("qwen3_5_moe", {"text_config": {"hidden_size": width}})
    stored, values = encode(model.converter.export(lab.parameters(model), 0))
    scale = next(v for n, v in stored.items() if n.endswith("experts.0.gate_proj.weight_scale_inv"))
    assert scale.shape == (1, -(-width // 128))
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    loaded, _, report = lab.load(lab.write(tmp_path / "fp8", stored, {**config, **FP8}))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-5
    assert any("activation" in notice for notice in report.notices)


@pytest.mark.report("LAY-03")
@pytest.mark.parametrize("declared", [True, False])
def test_fp8_bytes_without_their_scale_are_refused_in_every_family(declared: bool, lab: Any) -> None:
    for name, index in PER_EXPERT:
        model, _ = lab.tiny(name)
        stored, _ = encode(model.converter.export(lab.parameters(model), index))
        bare, _ = model.converter.ignore({n: v for n, v in stored.items() if not n.endswith("scale_inv")})
        with pytest.raises(QuantizationError, match="no scale that explains it"):
            decode_encodings(bare, FP8 if declared else {})


def square(name: str) -> Model:
    """A tiny model whose joined gate and up, or up where there is no gate, is square."""
    family = catalog().load(name)
    config = tiny_config(family)
    text = config.get("text_config", config)
    width = 64 if family.moe.experts.kind == "mlp" else 32
    text["hidden_size"], text[family.config.expert_width.keys[0]] = 64, width
    return build_tiny(family, config)


def fused_of(model: Model, index: int, disk: dict[str, mx.array]) -> list[str]:
    layout = model.converter.spec.experts[index]
    return [n for n in disk if f".{layout.path}.{layout.fused}" in n and not n.endswith("bias")]


@pytest.mark.report("LAY-13", "LAY-15")
@pytest.mark.parametrize(("name", "index"), TURNED)
def test_a_square_stack_is_read_in_the_declared_orientation(name: str, index: int, lab: Any) -> None:
    model = square(name)
    disk = model.converter.export(lab.parameters(model), index)
    fused = fused_of(model, index, disk)
    assert fused
    assert all(disk[n].shape[-2:] == (64, 64) for n in fused)
    assert lab.same(model.convert(disk).tensors, lab.parameters(model)) == []


@pytest.mark.report("LAY-13")
@pytest.mark.parametrize("name", ["llama4_text", "glm4_moe", "mixtral", "granitemoe"])
def test_a_square_stack_of_the_other_orientation_is_refused_by_its_down_projection(
    name: str, lab: Any
) -> None:
    model = square(name)
    index = next(i for i, e in enumerate(model.converter.spec.experts) if isinstance(e, Stacked))
    disk = model.converter.export(lab.parameters(model), index)
    turned = {
        n: v.swapaxes(-1, -2) if (v.ndim == 3 and "expert" in n) or "linear" in n else v
        for n, v in disk.items()
    }
    with pytest.raises(TensorError, match="not of the declared shape"):
        model.convert(turned)


@pytest.mark.report("LAY-13")
def test_two_declared_orientations_that_fit_alike_are_an_error(lab: Any, tmp_path: Path) -> None:
    """Without a gate and with an expert as wide as the model, every matrix is square."""
    (tmp_path / "two_ways.yaml").write_text(
        "family: two_ways\nextends: nemotron_h\nmodel_types: [two_ways]\narchitectures: []\n"
        "reference: a test\n"
        "checkpoint:\n  experts:\n"
        "    - {kind: stacked, path: mixer.experts, fused: up_proj}\n"
        "    - {kind: stacked, path: mixer.experts, fused: up_proj, transposed: true}\n"
    )
    family = catalog(tmp_path).load("two_ways")
    config = {**tiny_config(family), "hidden_size": 64, "moe_intermediate_size": 64}
    model = build_tiny(family, config)
    disk = model.converter.export(lab.parameters(model), 1)
    with pytest.raises(TensorError, match="their shapes cannot tell which it is"):
        model.convert(disk)


@pytest.mark.report("LAY-15")
@pytest.mark.parametrize("name", ["llama4", "llama4_text", "qwen3_vl_moe", "aria", "gpt_oss"])
def test_turned_stacks_are_quantised_along_their_input(name: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny(name)
    params = lab.parameters(model)
    index = next(i for n, i in TURNED if n == name)
    disk = model.converter.export(params, index)
    fused = fused_of(model, index, disk)[0]
    stack = model.converter.stack(model.plan.moe_layers[0])
    experts, width, columns = params[f"{stack.module(0)}.weight"].shape
    assert disk[fused].shape == (experts, columns, 2 * width)
    loaded, _, _ = lab.load(lab.write(tmp_path, disk, config))
    nn.quantize(
        loaded, 32, 4, class_predicate=lambda p, _: p.startswith(stack.container) and p.endswith("proj")
    )
    got = lab.parameters(loaded)
    for leaf in (-1, -2, -3):
        planes = mx.quantize(params[f"{stack.module(leaf)}.weight"], group_size=32, bits=4)
        for plane, want in zip(("weight", "scales", "biases"), planes, strict=True):
            assert mx.array_equal(got[f"{stack.module(leaf)}.{plane}"], want).item()


@pytest.mark.report("LAY-15")
@pytest.mark.parametrize("name", ["llama4_text", "qwen3_vl_moe", "aria"])
def test_planes_that_were_packed_along_the_output_are_refused(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    index = next(i for n, i in TURNED if n == name)
    disk = model.converter.export(lab.parameters(model), index)
    fused = fused_of(model, index, disk)[0]
    planes = mx.quantize(disk.pop(fused), group_size=32, bits=4)
    base = fused.removesuffix(".weight")
    disk |= {f"{base}.{p}": v for p, v in zip(("weight", "scales", "biases"), planes, strict=True)}
    with pytest.raises(TensorError, match=r"quantised along its output axis|not of the declared shape"):
        model.convert(disk)


def numbered_rows(experts: int, rows: int, columns: int) -> mx.array:
    """Every value is the number of its row."""
    return mx.broadcast_to(mx.arange(rows, dtype=mx.float32)[None, :, None], (experts, rows, columns))


@pytest.mark.report("LAY-16")
@pytest.mark.parametrize("packed", [False, True])
def test_interleaved_rows_and_their_biases_go_to_gate_and_up_in_turn(packed: bool, lab: Any) -> None:
    model, _ = lab.tiny("gpt_oss")
    disk = model.converter.export(lab.parameters(model), 0)
    base = "model.layers.1.mlp.experts"
    experts, width, columns = lab.parameters(model)[f"{base}.gate_proj.weight"].shape
    rows = numbered_rows(experts, 2 * width, columns)
    if packed:
        # mxfp4 blocks as the released files keep them, with a scale that tells the row.
        for layer in range(4):
            for leaf, out, into in (("gate_up_proj", 2 * width, columns), ("down_proj", columns, width)):
                stem, shape = f"model.layers.{layer}.mlp.experts.{leaf}", (experts, out, into // 32)
                del disk[stem]
                disk[f"{stem}_blocks"] = mx.full((*shape, 16), 0x22, dtype=mx.uint8)
                level = mx.arange(out, dtype=mx.uint32).astype(mx.uint8)
                disk[f"{stem}_scales"] = mx.broadcast_to(level[None, :, None], shape)
        disk = decode_encodings(disk, {"quantization_config": {"quant_method": "mxfp4"}}).weights
    else:
        disk[f"{base}.gate_up_proj"] = rows.swapaxes(-1, -2)
    disk[f"{base}.gate_up_proj_bias"] = rows[..., 0]
    got = model.convert(disk).tensors
    for leaf, first in (("gate_proj", 0), ("up_proj", 1)):
        want = np.arange(first, 2 * width, 2)
        values = got[f"{base}.{leaf}.{'scales' if packed else 'weight'}"][..., 0]
        assert (np.array(values) == want).all()
        assert (np.array(got[f"{base}.{leaf}.bias"]) == want).all()


@pytest.mark.report("LAY-16")
@pytest.mark.parametrize("name", ["glm4_moe", "granitemoe", "gemma4_text", "hunyuan_v1_moe"])
def test_joined_rows_go_to_gate_and_up_by_halves(name: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    index = next(
        i
        for i, e in enumerate(model.converter.spec.experts)
        if isinstance(e, Stacked) and not e.transposed and e.order == "gate_up"
    )
    disk = model.converter.export(lab.parameters(model), index)
    for fused in fused_of(model, index, disk):
        disk[fused] = numbered_rows(*disk[fused].shape)
    got = model.convert(disk).tensors
    stack = model.converter.stack(model.plan.moe_layers[0])
    gate, up = (np.array(got[f"{stack.module(leaf)}.weight"])[3, :, 0] for leaf in (0, 1))
    assert (gate == np.arange(len(gate))).all()
    assert (up == np.arange(len(gate), 2 * len(gate))).all()


@pytest.mark.report("LAY-05")
@pytest.mark.parametrize("shape", [(), (3,), (1, 64)])
@pytest.mark.parametrize("part", ["gate_up_proj_bias", "down_proj_bias"])
def test_a_bias_that_is_not_one_row_an_expert_is_named(part: str, shape: tuple[int, ...], lab: Any) -> None:
    model, _ = lab.tiny("gpt_oss")
    disk = model.converter.export(lab.parameters(model), 0)
    name = next(n for n in disk if n.endswith(part))
    before = {**disk, name: mx.zeros(shape)}
    with pytest.raises(TensorError) as caught:
        model.convert(dict(before))
    assert f"{name} has shape {list(shape)}" in caught.value.found
