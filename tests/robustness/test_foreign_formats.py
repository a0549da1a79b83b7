"""Other libraries' formats give the values that they store: scales of the whole, groups, names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from foreign_encoders import Encoder, Planes, compressed, integers, nvfp4

from mlx_experts import save_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.weights.packed import NVFP4_RANGE
from mlx_experts.registry.errors import QuantizationError
from mlx_experts.registry.spec.checkpoint import PerExpert


def gptq(bits: int, group: int) -> Encoder:
    """GPTQ's words along the input axis, which stands first, with zero points stored less one."""

    def encode(weight: mx.array, number: int) -> tuple[Planes, mx.array]:
        planes, value = integers(bits, group)(weight, number)
        half = 1 << bits - 1
        scale = planes["weight_scale"].T
        groups, rows = scale.shape
        zero = mx.full((groups, rows * bits // 32, 32 // bits), half - 1, dtype=mx.uint32)
        zeros = mx.sum(zero << mx.arange(0, 32, bits, dtype=mx.uint32), axis=-1)
        qweight = planes["weight_packed"].view(mx.uint32).T
        return {"qweight": qweight, "qzeros": zeros, "scales": mx.contiguous(scale)}, value

    return encode


def encoded(disk: Planes, encode: Encoder, only: Callable[[str], bool]) -> tuple[Planes, Planes]:
    stored, values = dict(disk), dict(disk)
    for number, (name, weight) in enumerate(disk.items()):
        if name.endswith(".weight") and weight.ndim == 2 and weight.shape[-1] % 32 == 0 and only(name):
            planes, values[name] = encode(weight, number)
            base = name.removesuffix("weight")
            stored.pop(name)
            stored |= {f"{base}{plane}": mx.contiguous(array) for plane, array in planes.items()}
    return stored, values


def one_by_one(lab: Any, name: str, stated: dict[str, Any] | None = None) -> tuple[Planes, dict[str, Any]]:
    """A tiny checkpoint with an expert a tensor, and its config."""
    model, config = lab.tiny(name, stated)
    experts = model.converter.spec.experts
    index = next(i for i, e in enumerate(experts) if isinstance(e, PerExpert) and not e.fused)
    return model.converter.export(lab.parameters(model), index), config


@pytest.mark.report("QNT-16")
@pytest.mark.parametrize(
    "name", ["glm4_moe", "deepseek_v3", "lfm2_moe", "jamba", "gemma4_text", "nemotron_h"]
)
def test_a_scale_of_the_whole_matrix_is_applied_in_every_kind_of_module(
    name: str, lab: Any, tmp_path: Path
) -> None:
    """Plain projections, routers, heads, embeddings, latent attention: where MLX has no such module too."""
    disk, config = one_by_one(lab, name)
    odd = ("norm", "conv", "embed_tokens_per_layer")
    stored, values = encoded(disk, nvfp4, lambda n: not any(word in n for word in odd))
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    loaded, saved, report = lab.load(lab.write(tmp_path / "packed", stored, config))
    del config["quantization_config"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert any(notice.startswith("unpacked while loading") for notice in report.notices)
    assert sum(n.endswith(".global_scale") for n in lab.parameters(loaded)) > 0
    save_model(tmp_path / "saved", loaded, saved)
    again, _, second = lab.load(tmp_path / "saved")
    assert lab.same(lab.parameters(again), lab.parameters(loaded)) == []
    assert second.notices == []


@pytest.mark.report("QNT-18")
@pytest.mark.parametrize("name", ["mixtral", "glm4_moe", "qwen3_5_moe"])
def test_gate_and_up_keep_scales_of_their_own_one_by_one(name: str, lab: Any, tmp_path: Path) -> None:
    disk, config = one_by_one(lab, name)
    up = {"mixtral": ".w3."}.get(name, ".up_proj.")
    encode = {True: lambda w, n: nvfp4(w, n, 1.25), False: lambda w, n: nvfp4(w, n, 1.0)}
    stored, values = dict(disk), dict(disk)
    for is_up in (True, False):
        mine = lambda n, is_up=is_up: "experts." in n and (up in n) == is_up  # noqa: E731
        part, exact = encoded(disk, encode[is_up], mine)
        stored |= {n: v for n, v in part.items() if n not in disk or mine(n)}
        values |= {n: v for n, v in exact.items() if mine(n)}
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    loaded, _, _ = lab.load(lab.write(tmp_path / "packed", stored, config))
    del config["quantization_config"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.agree(loaded, truth)
    scales = {n.split(".")[-2]: v for n, v in lab.parameters(loaded).items() if n.endswith("global_scale")}
    assert np.allclose(np.array(scales["gate_proj"]), NVFP4_RANGE)
    assert np.allclose(np.array(scales["up_proj"]), 1.25 * NVFP4_RANGE)


@pytest.mark.report("QNT-18", "QNT-22")
@pytest.mark.parametrize("apart", [True, False])
def test_a_fused_stack_is_cut_with_its_scales(apart: bool, lab: Any, tmp_path: Path) -> None:
    """[experts, 2] scales, one for each half, or [experts, 1] for both."""
    model, config = lab.tiny("qwen3_5_moe")
    disk = model.converter.export(lab.parameters(model), 1)
    values = dict(disk)
    for name in [n for n in disk if n.endswith("experts.gate_up_proj")]:
        weight = disk.pop(name)
        halves = [nvfp4(half, 0, s) for half, s in zip(mx.split(weight, 2, axis=1), (1.0, 1.25), strict=True)]
        if not apart:
            halves = [nvfp4(half, 0, 1.25) for half in mx.split(weight, 2, axis=1)]
        for plane in ("weight", "weight_scale"):
            disk[f"{name}.{plane}"] = mx.concatenate([planes[plane] for planes, _ in halves], axis=1)
        per_expert = [mx.broadcast_to(planes["weight_scale_2"], (weight.shape[0],)) for planes, _ in halves]
        disk[f"{name}.weight_scale_2"] = mx.stack(per_expert[: 2 if apart else 1], axis=1)
        values[name] = mx.concatenate([value for _, value in halves], axis=1)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    loaded, _, _ = lab.load(lab.write(tmp_path / "packed", disk, config))
    del config["quantization_config"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4


@pytest.mark.report("QNT-20", "QNT-23")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("told", [True, False])
def test_integers_are_read_in_the_groups_that_they_were_stored_in(
    bits: int, group: int, method: str, told: bool, lab: Any, tmp_path: Path
) -> None:
    """Where the config says 128 whatever was stored, the tensors are followed and a notice says so."""
    disk, config = one_by_one(lab, "olmoe", {"hidden_size": 128, "intermediate_size": 128})
    encode = integers(bits, group) if method == "compressed-tensors" else gptq(bits, group)
    stored, values = encoded(disk, encode, lambda n: "_proj" in n)
    said = group if told else 128
    entry = (
        compressed(bits, said)
        if method != "gptq"
        else {"quant_method": "gptq", "bits": bits, "group_size": said}
    )
    loaded, saved, report = lab.load(
        lab.write(tmp_path / "packed", stored, {**config, "quantization_config": entry})
    )
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.agree(loaded, truth)
    assert {f.bits for f in report.formats.values()} == {bits}
    assert {f.group_size for f in report.formats.values()} == {group}
    assert (report.notices == []) == (told or group == 128)
    assert "quantization_config" not in saved


@pytest.mark.report("QNT-20")
@pytest.mark.parametrize("name", ["qwen3_5_moe", "mixtral", "deepseek_v3", "afmoe", "dbrx"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 128)])
def test_packed_integers_load_in_families_of_every_spelling(
    name: str, bits: int, group: int, lab: Any, tmp_path: Path
) -> None:
    disk, config = one_by_one(lab, name)
    stored, values = encoded(disk, integers(bits, group), lambda n: "experts." in n)
    loaded, _, _ = lab.load(
        lab.write(tmp_path / "packed", stored, {**config, "quantization_config": compressed(bits, group)})
    )
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.agree(loaded, truth)


@pytest.mark.report("QNT-20")
@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    ],
)
def test_a_format_that_is_not_supported_is_refused_by_its_name(entry: Any, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("olmoe")
    with pytest.raises(QuantizationError) as caught:
        lab.load(lab.write(tmp_path, lab.parameters(model), {**config, "quantization_config": entry}))
    odd = {"marlin-24", "bitsandbytes", "marlin", "gemv", "W4A16_AWQ"} & {str(v) for v in entry.values()}
    assert odd.pop() in caught.value.found


@pytest.mark.report("QNT-22")
@pytest.mark.parametrize("fused", [False, True])
def test_wrapped_nvfp4_stacks_load_split_and_fused_gate_first(fused: bool, lab: Any) -> None:
    """D = F = 16 and two experts, as the report has it; and the tree's container under a wrapper's prefix."""
    stated = {"hidden_size": 16, "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    _, config = lab.tiny("laguna", stated)
    model = build_tiny(catalog().load("laguna"), config)
    params = lab.parameters(model)
    i = model.plan.moe_layers[0]
    stack = model.converter.stack(i)
    planes: Planes = {}
    for leaf in (0, 1, -1):
        packed, scales = mx.quantize(params.pop(f"{stack.module(leaf)}.weight"), mode="nvfp4")
        assert packed.shape == (2, 16, 2)
        assert scales.shape == (2, 16, 1)
        planes |= {f"{stack.module(leaf)}.weight": packed, f"{stack.module(leaf)}.scales": scales}
    disk = {f"language_model.{n}": v for n, v in {**params, **planes}.items()}
    if fused:
        for plane, last in (("weight", 2), ("scales", 1)):
            parts = [disk.pop(f"language_model.{stack.module(leaf)}.{plane}") for leaf in (0, 1)]
            whole = mx.concatenate(parts, axis=1)
            assert whole.shape == (2, 32, last)
            disk[f"language_model.{stack.container}.gate_up_proj.{plane}"] = whole
    assert lab.same(model.convert(disk).tensors, {**params, **planes}) == []
