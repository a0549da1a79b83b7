"""Every storage format gives the values that it stores: mixed bits, global scales, groups, types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_in_mlx_lm

from mlx_experts import save_model
from mlx_experts.engine.families import catalog
from mlx_experts.engine.load import cast_tensors
from mlx_experts.engine.packed import NVFP4_RANGE
from mlx_experts.engine.selfcheck import build_tiny
from mlx_experts.engine.trace import trace
from mlx_experts.registry.errors import QuantizationError
from mlx_experts.registry.layouts import PerExpert
from mlx_experts.registry.resolve import resolve
from mlx_experts.registry.synthetic import tiny_config

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
MLX_LM_NEEDS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
BIASED = [
    name
    for name in FAMILIES
    if (bias := resolve(catalog().load(name), tiny_config(catalog().load(name))).layers[-1].moe)
    and bias.router.selection_bias
    and bias.router.selection_bias.enabled
]
Tensors = dict[str, mx.array]


def decoded_token_by_token(model: Any, ids: mx.array) -> np.ndarray:
    """Logits of one token after the other, which is where the fused path runs."""
    cache = make_prompt_cache(model)
    return np.concatenate([np.array(model(ids[:, i : i + 1], cache=cache)) for i in range(ids.shape[1])], 1)


def agrees(lab: Any, loaded: Any, truth: Any, within: float = 1e-4) -> bool:
    """Prefill and single tokens, the latter fused in the quantised model, against float32 values."""
    trace.reset()
    got = decoded_token_by_token(loaded, lab.ids)
    assert trace.total("fused") > 0
    want = lab.logits(truth)
    return lab.distance(lab.logits(loaded), want) < within and lab.distance(got, want) < 50 * within


@pytest.mark.report("QNT-10")
def test_an_entry_without_a_mode_means_the_defaults_or_what_the_planes_prove(
    lab: Any, tmp_path: Path
) -> None:
    """mxfp4 everywhere, an override that leaves the mode out, and a router that is affine."""
    model, config = lab.tiny("qwen3_moe", MLX_LM_NEEDS)
    params = lab.parameters(model)
    is_gate = lambda n: n.endswith("mlp.gate.weight")  # noqa: E731
    stored, values = lab.pack(params, 4, 32, "mxfp4", only=lambda n: not is_gate(n))
    stored, gates = lab.pack(stored, 8, 64, only=is_gate)
    values = {n: gates[n] if is_gate(n) else values[n] for n in params}
    experts = {
        f"model.layers.1.mlp.switch_mlp.{p}_proj": {"group_size": 32, "bits": 4} for p in ("up", "down")
    }
    routers = {n.removesuffix(".weight"): {"group_size": 64, "bits": 8} for n in params if is_gate(n)}
    quantization = {"group_size": 32, "bits": 4, "mode": "mxfp4", **experts, **routers}
    folder = lab.write(tmp_path / "packed", stored, {**config, "quantization": quantization})
    loaded, saved, report = lab.load(folder)
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert agrees(lab, loaded, truth)
    assert report.notices == []
    assert {str(report.formats[path]) for path in experts} == {"mxfp4 4-bit group 32"}
    assert {str(report.formats[path]) for path in routers} == {"affine 8-bit group 64"}
    save_model(tmp_path / "saved", loaded, saved)
    theirs, _ = load_in_mlx_lm(tmp_path / "saved")
    assert lab.distance(lab.logits(theirs), lab.logits(loaded)) < 1e-4


@pytest.mark.report("QNT-12")
@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
@pytest.mark.parametrize("name", ["gemma4", "qwen3_5_moe", "mixtral"])
def test_modes_without_biases_need_none_beside_float_and_foreign_modules(
    name: str, mode: str, bits: int, group: int, lab: Any, tmp_path: Path
) -> None:
    """A projection that stayed float inside the text model, and a tower's linear outside of it."""
    model, config = lab.tiny(name)
    params = lab.parameters(model)
    plain = next(n for n in params if n.endswith("down_proj.weight"))
    stored, values = lab.pack(params, bits, group, mode, only=lambda n: n != plain)
    assert not any(n.endswith(".biases") for n in stored)
    config["quantization"] = {"group_size": group, "bits": bits, "mode": mode}
    extra = {"vision_tower.patch.proj.weight": mx.ones((4, 4))} if name != "mixtral" else {}
    loaded, _, report = lab.load(lab.write(tmp_path / "packed", {**stored, **extra}, config))
    del config["quantization"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert report.notices == []
    assert sum(report.dropped.values()) == len(extra)


MIXES = [
    {"gate": ("affine", 4, 64), "up": ("affine", 4, 64), "down": ("affine", 6, 64)},
    {"gate": ("affine", 3, 32), "up": ("affine", 8, 64), "down": ("affine", 5, 32)},
    {"gate": ("affine", 2, 64), "up": ("mxfp4", 4, 32), "down": ("mxfp8", 8, 32)},
    {"gate": ("nvfp4", 4, 16), "up": ("nvfp4", 4, 16), "down": ("affine", 8, 64)},
    {"gate": ("affine", 4, 32), "up": None, "down": ("affine", 6, 32)},
]


@pytest.mark.report("QNT-14")
@pytest.mark.parametrize(
    "mix", MIXES, ids=lambda m: "-".join(f"{v[0]}{v[1]}" if v else "float" for v in m.values())
)
@pytest.mark.parametrize("name", ["dots1", "mixtral"])
def test_projections_of_one_expert_stack_may_have_formats_of_their_own(
    name: str, mix: dict[str, Any], lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    params = lab.parameters(model)
    stored, values, entries = dict(params), dict(params), {}
    stacks = tuple(model.carrier.stack(i).container for i in model.plan.moe_layers)
    for leaf, form in mix.items():
        mode, bits, group = form or ("affine", 4, 32)
        mine = lambda n, leaf=leaf: n.startswith(stacks) and f".{leaf}_proj." in n  # noqa: E731
        if form is not None:
            packed, exact = lab.pack(params, bits, group, mode, only=mine)
            stored |= {n: v for n, v in packed.items() if mine(n)}
            values |= {n: v for n, v in exact.items() if mine(n)}
            said = {"group_size": group, "bits": bits, "mode": mode}
            entries |= {n.removesuffix(".weight"): said for n in params if mine(n)}
    first = next(iter(entries.values()))
    quantization = {**first, **{path: said for path, said in entries.items() if said != first}}
    loaded, saved, report = lab.load(
        lab.write(tmp_path / "packed", stored, {**config, "quantization": quantization})
    )
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert report.notices == []
    want = lab.logits(truth)
    assert lab.distance(lab.logits(loaded), want) < 1e-4
    assert lab.distance(decoded_token_by_token(loaded, lab.ids), want) < 5e-3
    save_model(tmp_path / "saved", loaded, saved)
    again, _, _ = lab.load(tmp_path / "saved")
    assert lab.same(lab.parameters(again), lab.parameters(loaded)) == []


def modelopt(weight: mx.array, number: int, whole: float | None = None) -> tuple[Tensors, mx.array]:
    """NVIDIA's nvfp4: packed bytes, a scale for 16 values, one for the matrix; and what they stand for."""
    scale = mx.array(whole if whole is not None else 0.02 * (1 + number % 5))
    packed, blocks = mx.quantize(weight / scale, mode="nvfp4")
    value = mx.dequantize(packed, blocks, mode="nvfp4", dtype=mx.float32) * scale
    planes = {"weight": packed.view(mx.uint8), "weight_scale": blocks, "weight_scale_2": scale}
    return {**planes, "input_scale": mx.array(1.0)}, value


def integers(bits: int, group: int) -> Callable[[mx.array, int], tuple[Tensors, mx.array]]:
    """compressed-tensors' symmetric integers, eight or four in a word."""

    def encode(weight: mx.array, number: int) -> tuple[Tensors, mx.array]:
        rows, columns = weight.shape
        size = min(group, columns)
        cut, top = weight.reshape(rows, -1, size), (1 << bits - 1) - 1
        scale = mx.abs(cut).max(-1, keepdims=True) / top
        values = mx.clip(mx.round(cut / scale), -top - 1, top)
        unsigned = (values + (top + 1)).astype(mx.uint32).reshape(rows, -1, 32 // bits)
        packed = mx.sum(unsigned << mx.arange(0, 32, bits, dtype=mx.uint32), axis=-1).astype(mx.int32)
        planes = {"weight_packed": packed, "weight_scale": scale.squeeze(-1)}
        planes["weight_shape"] = mx.array([rows, columns], mx.int64)
        return planes, (values * scale).reshape(rows, columns)

    return encode


def gptq(bits: int, group: int) -> Callable[[mx.array, int], tuple[Tensors, mx.array]]:
    """GPTQ's words along the input axis, which stands first, with zero points stored less one."""

    def encode(weight: mx.array, number: int) -> tuple[Tensors, mx.array]:
        planes, value = integers(bits, group)(weight, number)
        half = 1 << bits - 1
        scale = planes["weight_scale"].T
        groups, rows = scale.shape
        zero = mx.full((groups, rows * bits // 32, 32 // bits), half - 1, dtype=mx.uint32)
        zeros = mx.sum(zero << mx.arange(0, 32, bits, dtype=mx.uint32), axis=-1)
        qweight = planes["weight_packed"].view(mx.uint32).T
        return {"qweight": qweight, "qzeros": zeros, "scales": mx.contiguous(scale)}, value

    return encode


def compressed(bits: int, group: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": group, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def encoded(
    disk: Tensors, encode: Callable[[mx.array, int], tuple[Tensors, mx.array]], only: Callable[[str], bool]
) -> tuple[Tensors, Tensors]:
    stored, values = dict(disk), dict(disk)
    for number, (name, weight) in enumerate(disk.items()):
        if name.endswith(".weight") and weight.ndim == 2 and weight.shape[-1] % 32 == 0 and only(name):
            planes, values[name] = encode(weight, number)
            base = name.removesuffix("weight")
            stored.pop(name)
            stored |= {f"{base}{plane}": mx.contiguous(array) for plane, array in planes.items()}
    return stored, values


def one_by_one(lab: Any, name: str, stated: dict[str, Any] | None = None) -> tuple[Tensors, dict[str, Any]]:
    """A tiny checkpoint with an expert a tensor, and its config."""
    model, config = lab.tiny(name, stated)
    experts = model.carrier.spec.experts
    index = next(i for i, e in enumerate(experts) if isinstance(e, PerExpert) and not e.fused)
    return model.carrier.save(lab.parameters(model), index), config


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
    stored, values = encoded(disk, modelopt, lambda n: not any(word in n for word in odd))
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
    encode = {True: lambda w, n: modelopt(w, n, 1.25), False: lambda w, n: modelopt(w, n, 1.0)}
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
    assert agrees(lab, loaded, truth)
    scales = {n.split(".")[-2]: v for n, v in lab.parameters(loaded).items() if n.endswith("global_scale")}
    assert np.allclose(np.array(scales["gate_proj"]), NVFP4_RANGE)
    assert np.allclose(np.array(scales["up_proj"]), 1.25 * NVFP4_RANGE)


@pytest.mark.report("QNT-18", "QNT-22")
@pytest.mark.parametrize("apart", [True, False])
def test_a_fused_stack_is_cut_with_its_scales(apart: bool, lab: Any, tmp_path: Path) -> None:
    """[experts, 2] scales, one for each half, or [experts, 1] for both."""
    model, config = lab.tiny("qwen3_5_moe")
    disk = model.carrier.save(lab.parameters(model), 1)
    values = dict(disk)
    for name in [n for n in disk if n.endswith("experts.gate_up_proj")]:
        weight = disk.pop(name)
        halves = [
            modelopt(half, 0, s) for half, s in zip(mx.split(weight, 2, axis=1), (1.0, 1.25), strict=True)
        ]
        if not apart:
            halves = [modelopt(half, 0, 1.25) for half in mx.split(weight, 2, axis=1)]
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
    assert agrees(lab, loaded, truth)
    assert {f.bits for f in report.formats.values()} == {bits}
    assert {f.group_size for f in report.formats.values()} == {group}
    assert (report.notices == []) == (told or group == 128)
    assert "quantization_config" not in saved


@pytest.mark.report("QNT-20")
@pytest.mark.parametrize(
    "name", [n for n in FAMILIES if n in ("qwen3_5_moe", "mixtral", "deepseek_v3", "afmoe", "dbrx")]
)
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
    assert agrees(lab, loaded, truth)


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
    stack = model.carrier.stack(i)
    planes: Tensors = {}
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
    assert lab.same(model.carry(disk).tensors, {**params, **planes}) == []


@pytest.mark.report("QNT-25", "TIE-03")
@pytest.mark.parametrize("name", ["gemma4_text", "lfm2_moe", "granitemoe", "cohere2_moe", "qwen3_moe"])
@pytest.mark.parametrize("declared", [True, False])
def test_an_embedding_and_its_tied_head_are_read_at_bits_of_their_own(
    name: str, declared: bool, lab: Any, tmp_path: Path
) -> None:
    key = "tie_embedding" if name == "lfm2_moe" else "tie_word_embeddings"
    model, config = lab.tiny(name, {key: True})
    assert model.plan.head.tied
    params = lab.parameters(model)
    embed = f"{model.plan.family.names.root}.{model.plan.family.names.embed}.weight"
    stored, values = lab.pack(params, 6, 64, only=lambda n: n == embed)
    stored, rest = lab.pack(stored, 4, 64, only=lambda n: n != embed)
    values = {n: values[n] if n == embed else rest[n] for n in params}
    special = {embed.removesuffix(".weight"): {"group_size": 64, "bits": 6}} if declared else {}
    quantization = {"group_size": 64, "bits": 4, **special}
    loaded, _, report = lab.load(lab.write(tmp_path / "p", stored, {**config, "quantization": quantization}))
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert str(report.formats[embed.removesuffix(".weight")]) == "affine 6-bit group 64"


def halved(tensors: Tensors, scales: mx.Dtype, rest: mx.Dtype) -> Tensors:
    """Float tensors in one type, scales and biases of quantised ones in another."""
    return {
        n: v.astype(scales if n.endswith((".scales", ".biases")) else rest)
        if mx.issubdtype(v.dtype, mx.floating)
        else v
        for n, v in tensors.items()
    }


@pytest.mark.report("QNT-27")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_5_moe", "gemma4_text", "lfm2_moe"])
@pytest.mark.parametrize("asked", ["bfloat16", None])
def test_scales_take_the_type_of_the_activations_once(name: str, asked: str | None, lab: Any) -> None:
    """Scales in float16 beside bfloat16; asked for, or told by the config where the checkpoint decides."""
    _, config = lab.tiny(name)
    config |= {"dtype": "bfloat16"}
    model = build_tiny(catalog().load(name), config)
    stored, _ = lab.pack(lab.parameters(model), 4, 32)
    disk = halved(stored, mx.float16, mx.bfloat16)
    from mlx_experts.engine.quantize import Reader, quantize_modules

    quantize_modules(model, disk, Reader({"group_size": 32, "bits": 4}, model.carrier))
    cast = cast_tensors(model, disk, asked)
    planes = {v.dtype for n, v in cast.items() if n.endswith((".scales", ".biases"))}
    assert planes == {mx.bfloat16}
    model.load_weights(list(cast.items()))
    cache = make_prompt_cache(model)
    assert model(lab.ids, cache=cache).dtype == mx.bfloat16
    assert model(lab.ids[:, :1], cache=cache).dtype == mx.bfloat16


@pytest.mark.report("QNT-29")
@pytest.mark.parametrize("name", BIASED)
def test_correction_biases_are_never_narrowed(name: str, lab: Any) -> None:
    """Neither while loading nor when mlx-lm converts, whose cast asks the same question."""
    model, _ = lab.tiny(name)
    params = lab.parameters(model)
    leaf = catalog().load(name).moe.router.selection_bias.path.rsplit(".", 1)[-1]
    biases = {n for n in params if n.rsplit(".", 1)[-1] == leaf}
    assert len(biases) == len(model.plan.moe_layers)
    for dtype in ("bfloat16", "float16"):
        cast = cast_tensors(model, params, dtype)
        assert {cast[n].dtype for n in biases} == {mx.float32}
    assert not any(model.cast_predicate(n) for n in biases)
    stored, _ = lab.pack(params, 4, 32)
    assert all(stored[n].dtype == mx.float32 for n in biases)


@pytest.mark.report("QNT-29")
def test_biases_near_seven_pick_the_experts_that_float32_picks(lab: Any, tmp_path: Path) -> None:
    """256 experts, eight picked, biases of 6.80 to 7.06, which are 9 values in bfloat16."""
    stated = {
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    model, config = lab.tiny("glm4_moe", stated)
    layer = model.plan.moe_layers[0]
    bias = mx.random.uniform(6.80, 7.06, (256,), key=mx.random.key(4))
    assert len(set(np.array(bias.astype(mx.bfloat16).astype(mx.float32)).tolist())) <= 9
    name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    disk = halved({**lab.parameters(model)}, mx.bfloat16, mx.bfloat16) | {name: bias}
    loaded, _, _ = lab.load(lab.write(tmp_path, disk, config), dtype="bfloat16")
    block = loaded.layers[layer].mlp
    x = mx.random.normal((2000, 64), key=mx.random.key(5)).astype(mx.bfloat16)
    indices, _ = block._router(block, x)
    scores = 1 / (
        1 + np.exp(-(np.array(x.astype(mx.float32)) @ np.array(block.gate.weight.astype(mx.float32)).T))
    )
    want = np.sort(np.argsort(-(scores + np.array(bias)), axis=-1)[:, :8])
    got = np.sort(np.array(indices))
    assert (got == want).all(axis=1).mean() > 0.999
    assert loaded.layers[layer].mlp.gate.e_score_correction_bias.dtype == mx.float32
    narrow = np.array(bias.astype(mx.bfloat16).astype(mx.float32))
    wrong = np.sort(np.argsort(-(scores + narrow), axis=-1)[:, :8])
    assert (wrong == want).all(axis=1).mean() < 0.6
