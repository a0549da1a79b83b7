"""How planes are read: as declared where that fits, by their shapes with a notice where it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import representatives
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_in_mlx_lm

from mlx_experts import load_model, save_model
from mlx_experts.engine.layers.module_tree import look_up
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.engine.weights.quantization import Reader, quantize_modules, stored_format
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import QuantizationError, RegistryError

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
AFFINE = [("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64)]
MODES = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
Tensors = dict[str, mx.array]


def routers(model: Any) -> set[str]:
    """Weights of the routers; of a router of several matrices, its first."""
    found, names = set(), [name for name, _ in tree_flatten(model.parameters())]
    for i in model.plan.moe_layers:
        moe = model.plan.layers[i].moe
        path = ".".join(part for part in (moe.path, moe.router.path) if part)
        router = f"{model.converter.layers}.{i}.{path}."
        found.add(next(n for n in names if n.startswith(router) and n.endswith(".weight")))
    return found


def entry(mode: str, bits: int, group: int) -> dict[str, Any]:
    return {"group_size": group, "bits": bits, "mode": mode}


def read(model: Any, stored: Tensors, quantization: dict[str, Any]) -> tuple[dict[str, str], Reader]:
    """Formats by module, and the reader with its remarks; the shared model itself is not quantised."""
    reader = Reader(quantization, model.converter)
    formats = {}
    for path, module in model.named_modules():
        if f"{path}.weight" in stored and module.weight.ndim > 1:
            found = reader.read(path, module, stored)
            if found is not None:
                formats[path] = str(found)
    return formats, reader


@pytest.mark.report("QNT-01")
@pytest.mark.parametrize("name", representatives.one_of_each(representatives.routers, FAMILIES))
@pytest.mark.parametrize("stored_packed", [False, True])
def test_an_entry_for_a_router_is_used_if_it_is_packed_and_noted_if_it_is_not(
    name: str, stored_packed: bool, lab: Any
) -> None:
    model, config = lab.tiny(name)
    gates, params = routers(model), lab.parameters(model)
    stored, values = lab.pack(params, 8, 32, only=lambda n: stored_packed and n in gates)
    overrides = {gate.removesuffix(".weight"): {"group_size": 32, "bits": 8} for gate in gates}
    reader = Reader({"group_size": 32, "bits": 4, **overrides}, model.converter)
    tensors = model.convert(stored).tensors
    if not stored_packed:
        assert quantize_modules(model, tensors, reader) == {}
        assert any("because the tensors are not quantised" in remark for remark in reader.remarks())
        assert not reader.as_declared
        return
    formats = quantize_modules(build_tiny(catalog().load(name), config), tensors, reader)
    for gate in gates:
        base = gate.removesuffix(".weight")
        assert (base in formats) == (f"{base}.scales" in tensors)
        planes = [tensors.get(f"{base}.{plane}") for plane in ("scales", "biases")]
        got = (
            mx.dequantize(tensors[gate], *planes, group_size=32, bits=8) if base in formats else tensors[gate]
        )
        assert mx.allclose(got, values[gate]).item()


@pytest.mark.report("QNT-01")
@pytest.mark.parametrize("stored_packed", [False, True])
def test_what_is_saved_after_a_routers_entry_was_ignored_loads_in_mlx_lm(
    stored_packed: bool, lab: Any, tmp_path: Path
) -> None:
    """mlx-lm's own class cannot be quantised there, so that no such entry may be left."""
    needs = {
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "n_group": 1,
        "rope_scaling": None,
    }
    model, config = lab.tiny("glm4_moe", needs)
    gates = routers(model)
    stored, _ = lab.pack(lab.parameters(model), 4, 64, only=lambda n: n not in gates)
    if stored_packed:
        stored, _ = lab.pack(stored, 8, 64, only=lambda n: n in gates)
    overrides = {gate.removesuffix(".weight"): {"group_size": 64, "bits": 8} for gate in gates}
    config["quantization"] = {"group_size": 64, "bits": 4, **overrides}
    loaded, saved, report = lab.load(lab.write(tmp_path / "ours", stored, config))
    assert report.notices
    save_model(tmp_path / "saved", loaded, saved)
    theirs, _ = load_in_mlx_lm(tmp_path / "saved")
    assert lab.distance(lab.logits(theirs), lab.logits(loaded)) < 1e-4


@pytest.mark.report("QNT-03")
@pytest.mark.parametrize("declared", [True, False])
def test_a_routers_own_bits_are_honoured_kept_and_shown(declared: bool, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    gates = routers(model)
    stored, _ = lab.pack(lab.parameters(model), 8, 64, only=lambda n: n in gates)
    stored, _ = lab.pack(stored, 4, 64, only=lambda n: n not in gates)
    overrides = {gate.removesuffix(".weight"): {"group_size": 64, "bits": 8} for gate in gates}
    config["quantization"] = {"group_size": 64, "bits": 4, **(overrides if declared else {})}
    folder = lab.write(tmp_path / "one", stored, config)
    loaded, saved, report = lab.load(folder)
    found = {gate: str(report.formats[gate.removesuffix(".weight")]) for gate in gates}
    assert set(found.values()) == {"affine 8-bit group 64"}
    assert (report.notices == []) == declared
    shown = inspect_checkpoint(Checkpoint.open(folder)).formats
    assert shown["affine 8-bit group 64"] == len(gates)
    assert shown["affine 4-bit group 64"] == len(report.formats) - len(gates)
    save_model(tmp_path / "two", loaded, saved)
    again, _, second = lab.load(tmp_path / "two")
    assert second.formats == report.formats
    assert second.notices == []
    assert lab.same(lab.parameters(again), lab.parameters(loaded)) == []


@pytest.mark.report("QNT-05")
@pytest.mark.parametrize(("width", "want"), [(768, (8, 32)), (1536, (4, 64)), (3072, (2, 128))])
def test_one_pair_of_shapes_is_read_by_the_modules_input_width(width: int, want: tuple[int, int]) -> None:
    planes = {
        "weight": mx.zeros((8, 192), mx.uint32),
        "scales": mx.zeros((8, 24)),
        "biases": mx.zeros((8, 24)),
    }
    found = stored_format(planes, width)
    assert (found.bits, found.group_size, found.mode) == (*want, "affine")


@pytest.mark.report("QNT-05", "QNT-07", "QNT-12")
@pytest.mark.parametrize("stored_as", MODES)
def test_the_tensors_win_over_every_other_declared_pair_and_a_notice_says_so(
    stored_as: tuple[str, int, int], lab: Any
) -> None:
    model, _ = lab.tiny("qwen3_moe")
    mode, bits, group = stored_as
    stored, _ = lab.pack(lab.parameters(model), bits, group, mode)
    wrong = [{}, {"group_size": None, "bits": None}, entry(mode, 7, group), entry(mode, bits, 0)]
    wrong += [entry("affine", bits, 16), {"bits": str(bits), "group_size": group}, {"bits": bits}]
    wrong += [entry(*other) for other in MODES if other != stored_as]
    for declared in wrong:
        formats, reader = read(model, stored, declared)
        assert set(formats.values()) == {f"{mode} {bits}-bit group {group}"}
        assert len(reader.remarks()) == 1
        assert not reader.as_declared
    formats, reader = read(model, stored, entry(mode, bits, group))
    assert set(formats.values()) == {f"{mode} {bits}-bit group {group}"}
    assert reader.remarks() == []
    assert reader.as_declared


@pytest.mark.report("QNT-05")
def test_a_wrong_pair_listed_by_path_is_overruled_too(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    stored, values = lab.pack(lab.parameters(model), 2, 64)
    path = "model.layers.1.mlp.switch_mlp.up_proj"
    config["quantization"] = {"group_size": 32, "bits": 8, path: {"group_size": 32, "bits": 8}}
    loaded, saved, report = lab.load(lab.write(tmp_path / "packed", stored, config))
    assert any(
        "says affine 8-bit group 32, the tensors are affine 2-bit group 64" in n for n in report.notices
    )
    del config["quantization"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert saved["quantization"] == entry("affine", 2, 64)


def broken(kind: str, stored: Tensors, module: str) -> Tensors:
    """Planes of one module that fit no format."""
    result = dict(stored)
    weight, scales = stored[f"{module}.weight"], stored[f"{module}.scales"]
    if kind == "words":
        result[f"{module}.weight"] = weight[..., :-1]
    elif kind == "groups":
        result[f"{module}.scales"] = mx.concatenate([scales, scales[..., :1]], axis=-1)
    elif kind == "rows":
        result[f"{module}.scales"] = scales[:-1]
    elif kind == "no biases":
        result.pop(f"{module}.biases", None)
        result[f"{module}.scales"] = scales.astype(mx.float16)
    elif kind == "biases of bytes":
        result[f"{module}.biases"] = result[f"{module}.scales"] = mx.zeros(scales.shape, mx.uint8)
    elif kind == "seven bits":
        result[f"{module}.weight"] = mx.zeros((*weight.shape[:-1], 14), mx.uint32)
    elif kind == "a wide group":
        result[f"{module}.scales"] = result[f"{module}.biases"] = mx.zeros((*scales.shape[:-1], 4))
    else:
        del result[f"{module}.weight"]
    return result


@pytest.mark.report("QNT-07")
@pytest.mark.parametrize(
    "kind",
    ["words", "groups", "rows", "no biases", "biases of bytes", "seven bits", "a wide group", "no weight"],
)
@pytest.mark.parametrize(
    "stored_as", [("affine", 4, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_planes_that_fit_no_format_are_refused_with_their_name_the_pair_and_the_shapes(
    kind: str, stored_as: tuple[str, int, int], lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a plain projection and for stacked experts; `inspect` says the same, and nothing aborts."""
    model, config = lab.tiny("qwen3_moe")
    mode, bits, group = stored_as
    packed, _ = lab.pack(lab.parameters(model), bits, group, mode)
    config["quantization"] = entry(mode, bits, group)
    for module in ("model.layers.1.self_attn.q_proj", "model.layers.2.mlp.switch_mlp.up_proj"):
        folder = lab.write(tmp_path / module, broken(kind, packed, module), config)
        with pytest.raises(QuantizationError) as caught:
            lab.load(folder)
        assert module in caught.value.where
        if kind == "biases of bytes":
            assert "U8 [" in caught.value.found
        elif kind != "no weight":
            assert f"{mode} {bits}-bit group {group}" in caught.value.expected
            assert "scales" in caught.value.found
        assert run(["inspect", str(folder)]) == 1
        assert module in capsys.readouterr().out


WORDS = st.sampled_from(["group_size", "bits", "mode", "quant_method", "model.norm", "lm_head"]) | st.text(
    max_size=6
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-8, 300)
    | st.floats()
    | st.sampled_from(["mxfp4", "affine", "gptq"]),
    lambda inner: st.dictionaries(WORDS, inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@pytest.mark.report("QNT-07")
@given(declared=st.dictionaries(WORDS, VALUES, max_size=5), packed=st.booleans())
def test_any_declared_entry_is_read_or_refused(
    declared: Any, packed: bool, lab: Any, tmp_path_factory: Any
) -> None:
    model, config = lab.tiny("mixtral")
    stored = lab.pack(lab.parameters(model), 4, 32)[0] if packed else lab.parameters(model)
    folder = tmp_path_factory.getbasetemp() / f"entries-{packed}"
    if not folder.exists():
        lab.write(folder, stored, config)
    (folder / "config.json").write_text(json.dumps({**config, "quantization": declared}))
    try:
        _, saved, report = lab.load(folder, lazy=True)
    except RegistryError as error:
        where = error.where
    else:
        where = str(folder)
        assert bool(report.formats) == ("quantization" in saved) == packed
    assert "config.json" in where or where == str(folder)


PATH = "model.layers.1.mlp.switch_mlp.up_proj"
EIGHT = {"group_size": 64, "bits": 8}


@pytest.mark.report("QNT-05", "QNT-07")
@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"quantization": {**entry("affine", 4, 32), PATH: EIGHT}}, f"group 64, .* 4-bit group 32.*{PATH}"),
        (
            {"quantization": EIGHT},
            "says affine 8-bit group 64, the tensors are affine 4-bit .*lm_head",
        ),
        ({"quantization": {**entry("affine", 4, 32), PATH: False}}, f"says not quantised, .*: {PATH}"),
        ({"quantization": {**entry("affine", 4, 32), PATH: [8, 64]}}, f"no objects: {PATH}"),
        (
            {"quantization": entry("affine", 4, 32), "quantization_config": EIGHT},
            "quantization and quantization_config differ; the first is followed",
        ),
    ],
)
def test_what_the_tensors_overrule_is_said_to_whoever_loads_or_inspects(
    declared: dict[str, Any],
    said: str,
    lab: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Module, declared pair and used pair: nobody has to know whom to ask."""
    model, config = lab.tiny("qwen3_moe")
    stored, _ = lab.pack(lab.parameters(model), 4, 32)
    folder = lab.write(tmp_path, stored, {**config, **declared})
    load_model(folder, lazy=True)
    assert [r.name for r in caplog.records] == ["mlx_experts"]
    assert re.search(f"{re.escape(str(folder))}: .*{said}", caplog.text)
    assert run(["inspect", str(folder)]) == 0
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


@pytest.mark.report("QNT-07")
def test_an_entry_for_tensors_that_are_not_quantised_at_all_is_said(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    folder = lab.write(tmp_path, lab.parameters(model), {**config, "quantization": EIGHT})
    _, saved, report = lab.load(folder)
    want = "the config says affine 8-bit group 64, and no tensor is quantised; the tensors are right"
    # The tensors alone: of the folder, inspecting says too that it has no tokenizer.
    seen = inspect_checkpoint(Checkpoint.open(folder), tensors_only=True)
    assert report.notices == seen.notices == [want]
    assert "quantization" not in saved


@pytest.mark.report("QNT-07")
def test_an_entry_of_mlx_over_tensors_of_another_library_is_said(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("qwen3_moe")
    stored, module = lab.parameters(model), "model.layers.1.self_attn.q_proj"
    stored[f"{module}.weight"] = mx.to_fp8(stored[f"{module}.weight"])
    stored[f"{module}.weight_scale"] = mx.ones((1,))
    folder = lab.write(tmp_path, stored, {**config, "quantization": EIGHT})
    _, _, report = lab.load(folder)
    assert len(report.notices) == 2
    assert "MLX's own packing ({'group_size': 64, 'bits': 8})" in report.notices[0]
    assert f"fp8 with a scale for each tensor or row; the tensors are right: {module}" in report.notices[0]
    # The tensors alone: of the folder, inspecting says too that it has no tokenizer.
    assert inspect_checkpoint(Checkpoint.open(folder), tensors_only=True).notices == report.notices


def test_what_loads_as_declared_is_loaded_in_silence(
    lab: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, config = lab.tiny("qwen3_moe")
    stored, _ = lab.pack(lab.parameters(model), 4, 32)
    load_model(lab.write(tmp_path, stored, {**config, "quantization": entry("affine", 4, 32)}), lazy=True)
    assert caplog.records == []


@pytest.mark.parametrize("width", [48, 80, 112])
def test_nvfp4_takes_widths_that_four_words_do_not_divide(width: int, lab: Any) -> None:
    config = lab.resized("qwen3_moe", hidden_size=width)
    model = build_tiny(catalog().load("qwen3_moe"), config)
    stored, values = lab.pack(lab.parameters(model), 4, 16, "nvfp4", only=lambda n: "embed" in n)
    table = nn.QuantizedEmbedding(*values["model.embed_tokens.weight"].shape, 16, 4, mode="nvfp4")
    table.update({leaf: stored[f"model.embed_tokens.{leaf}"] for leaf in ("weight", "scales")})
    for count in (1, 2, 3, 5):
        ids = mx.arange(count)[None] + 7
        got = look_up(table, ids, mx.float32)
        assert mx.array_equal(got, values["model.embed_tokens.weight"][ids]).item()
