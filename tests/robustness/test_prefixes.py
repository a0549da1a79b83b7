"""Wrappers, nested settings and other spellings change neither what is read nor what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.values import Ref

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
WRAPPED = ("", "language_model.", "model.language_model.", "language_model.model.", "model.")


def bare(model: Any, path: str) -> str:
    """A module path of the tree without whatever stands before the decoder's own modules."""
    names = model.plan.family.names
    return path.removeprefix(f"{names.wrapper}.{names.root}.".removeprefix("."))


@pytest.mark.report("PRE-01")
@pytest.mark.parametrize("name", FAMILIES)
def test_entries_match_with_and_without_a_wrappers_prefix(name: str, lab: Any) -> None:
    """The router of every family, as each tool may spell its path."""
    model, _ = lab.tiny(name)
    i = model.plan.moe_layers[0]
    moe = model.plan.layers[i].moe
    parts = [part for part in (model.converter.layers, str(i), moe.path, moe.router.path) if part]
    router = ".".join(parts)
    if f"{router}.weight" not in lab.parameters(model):
        # A router of several matrices; its first one.
        inside = (n for n in lab.parameters(model) if n.startswith(f"{router}.") and n.endswith(".weight"))
        router = next(inside).removesuffix(".weight")
    tail = bare(model, router)
    for prefix in WRAPPED:
        assert model.converter.modules(f"{prefix}{tail}") == [router], prefix
    assert model.converter.modules(f"vision_tower.{tail}") == []
    assert model.converter.modules(f"{router}e") == []


@pytest.mark.report("PRE-01", "PRE-03")
@pytest.mark.parametrize("name", FAMILIES)
def test_entries_match_through_every_rename_cut_and_stack(name: str, lab: Any) -> None:
    """Every module of a checkpoint, as each declared layout spells it, reaches the module that it becomes."""
    model, _ = lab.tiny(name)
    params = lab.parameters(model)
    matrices = {n.removesuffix(".weight") for n, v in params.items() if n.endswith(".weight") and v.ndim > 1}
    for index, layout in enumerate(model.converter.spec.experts):
        if getattr(layout, "packed", None):
            continue
        reached: set[str] = set()
        lost = []
        for disk in model.converter.export(params, index):
            module = disk.removesuffix(".weight")
            found = model.converter.modules(module)
            reached.update(found)
            if not found and disk.endswith(".weight"):
                lost.append(module)
        assert lost == []
        assert matrices - reached == set()


@pytest.mark.report("PRE-01", "QNT-03")
@pytest.mark.parametrize("prefix", WRAPPED)
@pytest.mark.parametrize("name", ["lfm2_moe", "qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe", "llama4"])
def test_a_wider_router_is_read_as_declared_whatever_wrapper_its_entry_has(
    name: str, prefix: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    params = lab.parameters(model)
    routers = {
        f"{model.converter.layers}.{i}.{model.plan.layers[i].moe.path}.{model.plan.layers[i].moe.router.path}"
        for i in model.plan.moe_layers
    }
    wide, wide_values = lab.pack(params, 8, 64, only=lambda n: n.removesuffix(".weight") in routers)
    stored, values = lab.pack(wide, 4, 64, only=lambda n: n.removesuffix(".weight") not in routers)
    values |= {n: v for n, v in wide_values.items() if n.removesuffix(".weight") in routers}
    values = {n: v for n, v in values.items() if n in params}
    entries = {f"{prefix}{bare(model, router)}": {"bits": 8, "group_size": 64} for router in routers}
    quantization = {"group_size": 64, "bits": 4, **entries}
    loaded, _, report = lab.load(
        lab.write(tmp_path / "packed", stored, {**config, "quantization": quantization})
    )
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    # A bare router is unpacked, and a notice says so; a linear one stays as it was stored.
    assert [notice for notice in report.notices if not notice.startswith("unpacked")] == []
    assert (report.notices == []) == all(router in report.formats for router in routers)
    for router in routers:
        assert str(report.formats.get(router, "affine 8-bit group 64")) == "affine 8-bit group 64"


@pytest.mark.report("PRE-01")
def test_entries_that_match_nothing_are_listed(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("lfm2_moe")
    stored, _ = lab.pack(lab.parameters(model), 4, 64)
    config["quantization"] = {
        "group_size": 64,
        "bits": 4,
        "model.layers.99.mlp.gatee": {"bits": 8, "group_size": 64},
        "model.layers.98.mlp.gatee": {"bits": 8, "group_size": 64},
        "model.layers.1.feed_forward.gatee": False,
        "nonsense": {"bits": 2, "group_size": 32},
    }
    folder = lab.write(tmp_path, stored, config)
    _, saved, report = lab.load(folder)
    want = (
        "quantisation entries that match no module: model.layers.1.feed_forward.gatee, "
        "model.layers.{n}.mlp.gatee (2 modules), nonsense"
    )
    assert want in report.notices
    assert want in inspect_checkpoint(Checkpoint.open(folder)).notices
    # What is saved from it has no such entries.
    assert "nonsense" not in saved["quantization"]


@pytest.mark.report("PRE-03")
def test_raw_names_and_exceptions_in_entries_are_followed(lab: Any, tmp_path: Path) -> None:
    """Six bits for one projection, a tower's exception, and a head that stays float, in the raw spelling."""
    model, config = lab.tiny(
        "qwen3_5_moe", {"text_config": {"hidden_size": 128, "tie_word_embeddings": False}}
    )
    params = lab.parameters(model)
    special = next(n for n in params if "in_proj_qkv" in n).removesuffix(".weight")
    head = "language_model.lm_head"
    six, six_values = lab.pack(params, 6, 128, only=lambda n: n == f"{special}.weight")
    rest = lambda n: n not in (f"{special}.weight", f"{head}.weight")  # noqa: E731
    stored, values = lab.pack(six, 4, 128, only=rest)
    values = {n: six_values[n] if n == f"{special}.weight" else values[n] for n in params}
    quantization = {
        "group_size": 128,
        "bits": 4,
        f"model.language_model.{bare(model, special)}": {"group_size": 128, "bits": 6},
        "model.visual.blocks.0.attn.qkv": False,
        "lm_head": False,
    }
    loaded, saved, report = lab.load(
        lab.write(tmp_path / "packed", stored, {**config, "quantization": quantization})
    )
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert report.notices == []
    assert str(report.formats[special]) == "affine 6-bit group 128"
    assert head not in report.formats
    assert saved["quantization"] == quantization


OPTIONAL = (
    "vision_config",
    "audio_config",
    "quantization_config",
    "rope_scaling",
    "rope_parameters",
    "generation_config",
    "sliding_window",
    "auto_map",
    "speculator",
)


@pytest.mark.report("PRE-06")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_null_sub_config_is_an_absent_one(name: str, lab: Any) -> None:
    """In every family, at the top and in nested settings."""
    family = catalog().load(name)
    plain = tiny_config(family)
    nulls = tiny_config(family)
    for level in [nulls, *(v for k, v in nulls.items() if k.endswith("text_config"))]:
        for key in OPTIONAL:
            level.setdefault(key, None)
    if not family.text_config:
        nulls.setdefault("text_config", None)
    with_nulls, without = resolve(family, nulls), resolve(family, plain)
    assert with_nulls.layers == without.layers
    assert with_nulls.head == without.head


@pytest.mark.report("PRE-06")
@pytest.mark.parametrize("name", ["qwen3_5_moe", "gemma4", "llama4", "qwen3_moe", "qwen3_omni_moe"])
def test_a_quantised_checkpoint_loads_with_null_sub_configs(name: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny(name)
    stored, _ = lab.pack(lab.parameters(model), 4, 32)
    config |= dict.fromkeys(OPTIONAL[:3])
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": None}
    loaded, _, report = lab.load(lab.write(tmp_path, stored, config))
    assert report.formats
    assert report.notices == []
    assert lab.logits(loaded).shape[-1] == model.plan.sizes.vocab_size


def rope_levels(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config, *(v for v in config.values() if isinstance(v, dict) and "hidden_size" in v)]


# Whose rotations stand under names of their own, and mean something else where they do not.
BY_NAME = {
    "beam": "layers of a type without parameters of their own rotate nothing (BeamConfig)",
    "deepseek_v4": "the entries `main` and `compress`, each with an older key of its own",
}


@pytest.mark.report("PRE-08")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BY_NAME])
def test_nested_and_flat_rotary_bases_give_equal_plans(name: str) -> None:
    family = catalog().load(name)
    flat, nested = tiny_config(family), tiny_config(family)
    for config in (flat, nested):
        for level in rope_levels(config):
            for key in ("rope_theta", "rope_parameters", "rope_scaling"):
                level.pop(key, None)
    flat["rope_theta"] = 1e7
    nested["rope_parameters"] = {"rope_theta": 1e7, "rope_type": "default"}
    if family.text_config:
        key = family.text_keys[0]
        flat[key]["rope_theta"] = flat.pop("rope_theta")
        nested[key]["rope_parameters"] = nested.pop("rope_parameters")
    one, other = (resolve(family, config) for config in (flat, nested))
    bases = [(a.rope.theta, b.rope.theta) for a, b in zip(one.layers, other.layers, strict=True) if a.rope]
    for a, b in zip(one.layers, other.layers, strict=True):
        assert (a.rope is None) == (b.rope is None)
    # A family may fix the base of some layers, or ask for it under a name of its own.
    assert all(b == 1e7 for a, b in bases if a == 1e7)
    assert not bases or any(b == 1e7 for _, b in bases)


def tied(name: str) -> bool:
    return isinstance(catalog().load(name).head.tied, Ref)


@pytest.mark.report("PRE-08", "TIE-01", "TIE-03")
@pytest.mark.parametrize("name", [name for name in FAMILIES if tied(name)])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_head_beside_a_tied_embedding_is_ignored_if_equal_and_used_if_not(
    name: str, bits: int | None, lab: Any
) -> None:
    family = catalog().load(name)
    stated: dict[str, Any] = {}
    at = stated
    key = family.head.tied.keys[0]
    if family.text_config and not family.head.tied.outer:
        at = stated.setdefault(family.text_keys[0], {})
    *parents, leaf = key.split(".")
    for parent in parents:
        at = at.setdefault(parent, {})
    at[leaf] = True
    model, _ = lab.tiny(name, stated)
    assert model.plan.head.tied
    names, params = family.names, lab.parameters(model)
    wrapper = f"{names.wrapper}." if names.wrapper else ""
    whole = (model.plan.sizes.vocab_size, model.plan.sizes.hidden_size)
    inside = f"{wrapper}{names.root}.{names.embed}."
    embedding = next(n for n, v in params.items() if n.startswith(inside) and v.shape == whole)
    head = f"{wrapper}{family.head.path}.weight"
    if bits is not None:
        params, _ = lab.pack(params, bits, 32, only=lambda n: n == embedding)
    copies = {
        n.replace(embedding.removesuffix("weight"), head.removesuffix("weight")): v
        for n, v in params.items()
        if n.startswith(embedding.removesuffix("weight"))
    }
    carried = model.convert({**params, **copies})
    assert lab.same(carried.tensors, model.convert(params).tensors) == []
    assert carried.ignored["head equal to the tied embedding"] == len(copies)
    copies[head] = copies[head] + 1
    assert model.convert({**params, **copies}).own_head
