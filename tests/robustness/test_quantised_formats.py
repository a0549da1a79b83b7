"""Every storage format gives the values that it stores: mixed bits, global scales, groups, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_in_mlx_lm
from representatives import tiny_plan

from mlx_experts import save_model
from mlx_experts.engine.loading.checkpoint_loader import cast_tensors
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
MLX_LM_NEEDS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}


def has_bias(name: str) -> bool:
    plan = tiny_plan(name)
    bias = plan.layers[plan.moe_layers[0]].moe.router.selection_bias
    return bias is not None and bias.enabled


BIASED = [name for name in FAMILIES if has_bias(name)]
Tensors = dict[str, mx.array]


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
    assert lab.agree(loaded, truth)
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
    folder = lab.write(tmp_path / "packed", {**stored, **extra}, config)
    loaded, _, report = lab.load(folder)
    paths = inspect_checkpoint(Checkpoint.open(folder)).paths
    assert paths
    assert not [row for row in paths if row["reason"].startswith("dtype")]
    del config["quantization"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert report.notices == []
    assert sum(report.ignored.values()) == len(extra)


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
    stacks = tuple(model.converter.stack(i).container for i in model.plan.moe_layers)
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
    assert lab.distance(lab.decoded(loaded), want) < 5e-3
    save_model(tmp_path / "saved", loaded, saved)
    again, _, _ = lab.load(tmp_path / "saved")
    assert lab.same(lab.parameters(again), lab.parameters(loaded)) == []


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
    from mlx_experts.engine.weights.quantization import Reader, quantize_modules

    quantize_modules(model, disk, Reader({"group_size": 32, "bits": 4}, model.converter))
    cast = cast_tensors(model, disk, asked)
    planes = {v.dtype for n, v in cast.items() if n.endswith((".scales", ".biases"))}
    assert planes == {mx.bfloat16}
    model.load_weights(list(cast.items()))
    cache = make_prompt_cache(model)
    assert model(lab.ids, cache=cache).dtype == mx.bfloat16
    assert model(lab.ids[:, :1], cache=cache).dtype == mx.bfloat16


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe"])
@pytest.mark.parametrize("stored_as", [mx.bfloat16, mx.float16])
def test_scales_stay_narrow_beside_activations_in_float32(name: str, stored_as: mx.Dtype, lab: Any) -> None:
    """What the CPU computes is the same to the last bit, and reads less."""
    _, config = lab.tiny(name)
    model = build_tiny(catalog().load(name), config)
    stored, _ = lab.pack(lab.parameters(model), 4, 32)
    disk = halved(stored, stored_as, stored_as)
    from mlx_experts.engine.weights.quantization import Reader, quantize_modules

    quantize_modules(model, disk, Reader({"group_size": 32, "bits": 4}, model.converter))
    kept = cast_tensors(model, disk, "float32")
    narrow = {n for n, v in kept.items() if v.dtype == stored_as}
    assert narrow
    assert all(n.endswith((".scales", ".biases")) and "embed" not in n for n in narrow)
    assert all(v.dtype == mx.float32 for n, v in kept.items() if n.endswith("norm.weight"))
    found = []
    for tensors in (kept, {n: v.astype(mx.float32) if n in narrow else v for n, v in kept.items()}):
        model.load_weights(list(tensors.items()))
        cache = make_prompt_cache(model)
        found.append([model(lab.ids, cache=cache), model(lab.ids[:, :1], cache=cache)])
    for ours, wide in zip(*found, strict=True):
        assert ours.dtype == mx.float32
        assert mx.array_equal(ours, wide)


@pytest.mark.parametrize("leaf", ["scales", "biases"])
def test_scales_and_biases_of_two_types_are_widened(leaf: str, lab: Any) -> None:
    """A kernel reads both in one dtype."""
    _, config = lab.tiny("qwen3_moe")
    model = build_tiny(catalog().load("qwen3_moe"), config)
    stored, _ = lab.pack(lab.parameters(model), 4, 32)
    disk = halved(stored, mx.bfloat16, mx.bfloat16)
    odd = {n for n in disk if n.endswith(f".{leaf}")}
    disk |= {n: disk[n].astype(mx.float16) for n in odd}
    from mlx_experts.engine.weights.quantization import Reader, quantize_modules

    quantize_modules(model, disk, Reader({"group_size": 32, "bits": 4}, model.converter))
    cast = cast_tensors(model, disk, "float32")
    assert {v.dtype for n, v in cast.items() if n.endswith((".scales", ".biases"))} == {mx.float32}
    model.load_weights(list(cast.items()))
    assert mx.isfinite(model(lab.ids)).all().item()


@pytest.mark.report("QNT-29")
@pytest.mark.parametrize("name", BIASED)
def test_correction_biases_are_never_narrowed(name: str, lab: Any) -> None:
    """Neither while loading nor when mlx-lm converts, whose cast asks the same question."""
    model, _ = lab.tiny(name)
    params = lab.parameters(model)
    path = catalog().load(name).moe.router.selection_bias.path
    biases = {n for n in params if n.endswith(f".{path}")}
    # A layer whose tokens a table routes selects nothing.
    tables = sum(leaf_name.endswith("tid2eid") for leaf_name in params)
    assert len(biases) == len(model.plan.moe_layers) - tables
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
    indices, _ = block.route(x)
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
