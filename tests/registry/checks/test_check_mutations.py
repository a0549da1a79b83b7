"""The checks have teeth: each planted mistake makes them fail and names what is wrong."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from mlx.utils import tree_flatten, tree_unflatten

from mlx_experts.engine.dispatch import eligibility
from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools import family_check as selfcheck
from mlx_experts.engine.tools import parity
from mlx_experts.engine.tools.drafts.evidence import plain
from mlx_experts.engine.tools.reference_cases import TOLERANCE, measure
from mlx_experts.registry.catalog.catalog import Catalog, merge
from mlx_experts.registry.checks import known_names as vocabulary
from mlx_experts.registry.checks.coverage import Known, mlx_lm_families
from mlx_experts.registry.checks.static_check import check_fast
from mlx_experts.registry.errors import ConfigError, RegistryError, SpecError, TensorError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

CASE = Path(__file__).parents[2] / "cases" / "mixtral" / "base"


def mutant(folder: Path, change: dict[str, Any], base: str = "mixtral") -> str:
    """Write a family that is ``base`` with one mistake, and return its name."""
    data = {
        "family": "mutant",
        "extends": base,
        "model_types": ["mutant"],
        "architectures": ["MutantForCausalLM"],
        "reference": "a test",
    }
    (folder / "mutant.yaml").write_text(yaml.safe_dump(merge(data, change), sort_keys=False))
    return "mutant"


def test_a_missing_family_file_is_named_with_the_command_to_draft_it(tmp_path: Path) -> None:
    families = tmp_path / "families"
    shutil.copytree(str(resources.files("mlx_experts.families")), families)
    (families / "mixtral.yaml").unlink()
    report = check_fast(Catalog(bundled=families))
    assert any("'mixtral'" in p and "registry draft" in p for p in report.problems["coverage"])


def test_an_architecture_of_a_newer_mlx_lm_is_named() -> None:
    known = [*mlx_lm_families(), Known("mlx-lm", "qwen9_moe", "mlx_lm/models/qwen9_moe.py")]
    report = check_fast(catalog(), known=known)
    assert any("qwen9_moe" in problem for problem in report.problems["coverage"])


def test_a_module_that_only_inherits_its_experts_is_found(tmp_path: Path) -> None:
    (tmp_path / "base_moe.py").write_text("from .switch_layers import SwitchGLU\n")
    (tmp_path / "heir.py").write_text("from . import base_moe\n")
    (tmp_path / "dense.py").write_text("from .base import x\n")
    assert [k.model_type for k in mlx_lm_families(tmp_path)] == ["base_moe", "heir"]


def test_a_broken_layout_pattern_names_the_tensors(tmp_path: Path) -> None:
    layouts = {
        "experts": [{"kind": "per_expert", "path": "block.experts", "projections": ["w1", "w3", "w2"]}]
    }
    name = mutant(tmp_path, {"checkpoint": layouts})
    with pytest.raises(TensorError, match=r"block_sparse_moe\.experts\.\{n\}\.w1\.weight"):
        load_model(CASE / "hub", families=(tmp_path,), family=name)


def test_a_renamed_leaf_names_the_parameter(tmp_path: Path) -> None:
    name = mutant(tmp_path, {"moe": {"router": {"path": "router"}}})
    with pytest.raises(TensorError, match=r"block_sparse_moe\.(router|gate)\.weight"):
        load_model(CASE / "hub", families=(tmp_path,), family=name)


def test_swapped_gate_and_up_load_and_differ_from_the_original(tmp_path: Path) -> None:
    path = "block_sparse_moe.experts"
    layouts = {"experts": [{"kind": "per_expert", "path": path, "projections": ["w3", "w1", "w2"]}]}
    name = mutant(tmp_path, {"checkpoint": layouts})
    model, _ = load_model(CASE / "hub", families=(tmp_path,), family=name)
    measured = measure(model, CASE / "oracle.npz")
    assert not measured.ok
    assert measured.full > 0.01


@pytest.mark.parametrize(
    ("change", "key", "hint"),
    [
        ({"attention": {"kind": "mlla"}}, "attention.kind", "'mla'"),
        ({"block": {"kind": "shortcutt"}}, "block.kind", "'shortcut'"),
        ({"embedding": {"kind": "ngramm"}}, "embedding.kind", "'ngram'"),
        ({"moe": {"router": {"select": "sparsmixer"}}}, "moe.router.select", "'sparsemixer'"),
        ({"moe": {"experts": {"activation": "swigl"}}}, "moe.experts.activation", "'swiglu'"),
        (
            {"moe": {"experts": {"activation": {"from": "act", "default": "swigl"}}}},
            "moe.experts.activation",
            "'swiglu'",
        ),
        (
            {"checkpoint": {"conversions": [{"plugin": "absorb", "from": "a"}]}},
            "checkpoint.conversions.0.plugin",
            "'absorb_kv'",
        ),
    ],
)
def test_the_fast_check_names_what_nothing_offers(
    tmp_path: Path, change: dict[str, Any], key: str, hint: str
) -> None:
    name = mutant(tmp_path, change)
    report = check_fast(Catalog([tmp_path]), [name])
    assert f"'{key}' names no" in report.problems[name][0]
    assert str(tmp_path / "mutant.yaml") in report.problems[name][0]
    assert hint in report.problems[name][0]


def test_the_fast_check_takes_what_a_plugin_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = mutant(tmp_path, {"attention": {"kind": "my_mixer", "rope": None}})
    monkeypatch.setattr(vocabulary, "registered", lambda kind: {"my_mixer"} if kind == "mixer" else set())
    assert check_fast(Catalog([tmp_path]), [name]).ok


def _literals() -> list[tuple[dict[str, Any], str]]:
    def stands_in(value: Any) -> dict[str, Any]:
        return {"from": "no_such_key", "default": value}

    return [
        ({"moe": {"router": {"scale": stands_in("big")}}}, "moe.router.scale"),
        ({"moe": {"router": {"score": stands_in("softmx")}}}, "moe.router.score"),
        (
            {"moe": {"router": {"score": {"from": "hidden_act", "map": {"silu": "softmx"}}}}},
            "moe.router.score",
        ),
        ({"moe": {"router": {"scale": {"from": "hidden_act", "present": "big"}}}}, "moe.router.scale"),
        ({"moe": {"experts": {"bias": stands_in("no")}}}, "moe.experts.bias"),
        ({"config": {"num_layers": stands_in(10**6)}}, "config.num_layers"),
        ({"config": {"top_k": stands_in(-2)}}, "config.top_k"),
        ({"head": {"softcap": stands_in(stands_in("x"))}}, "head.softcap"),
        ({"attention": {"scale": stands_in(-1.0)}}, "attention.scale"),
        ({"attention": {"rope": {"theta": -1.0}}}, "attention.rope.theta"),
        ({"attention": {"rope": {"partial": 3.0}}}, "attention.rope.partial"),
        ({"attention": {"rope": {"style": stands_in("wide")}}}, "attention.rope.style"),
        ({"attention": {"rope": {"dims": stands_in(0)}}}, "attention.rope.dims"),
        ({"attention": {"rope": {"enabled": stands_in("no")}}}, "attention.rope.enabled"),
        ({"attention": {"rope": {"when_absent": stands_in([1])}}}, "attention.rope.when_absent"),
        ({"attention": {"rope": {"options": stands_in(3)}}}, "attention.rope.options"),
        (
            {"attention": {"rope": {"scaled_types": stands_in("full_attention")}}},
            "attention.rope.scaled_types",
        ),
    ]


@pytest.mark.parametrize(("change", "key"), _literals(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_bad_literal_is_told_at_the_family_and_not_at_the_config(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    family = Catalog([tmp_path]).load(mutant(tmp_path, change))
    config = {**tiny_config(family), "hidden_act": "silu"}
    config.pop("no_such_key", None)
    config.pop("rope_theta")
    with pytest.raises(SpecError) as caught:
        resolve(family, config)
    assert caught.value.what.startswith(f"'{key}' ")
    assert caught.value.where == "mutant.yaml"
    assert caught.value.expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", "64", "a whole number"),
        ("hidden_size", 64.5, "a whole number"),
        ("hidden_size", -4, "a number above 0"),
        ("num_local_experts", -1, "a number of at least 0"),
        ("vocab_size", 2**40, "a number below 2.68435e+08"),
        ("rms_norm_eps", "small", "a number"),
        ("rms_norm_eps", -1e-5, "a number above 0"),
        ("rms_norm_eps", {"from": "x"}, "a number"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("hidden_act", 3, "text"),
    ],
)
def test_what_a_config_may_hold_is_said_in_our_words(key: str, value: Any, expected: str) -> None:
    family = catalog().load("mixtral")
    with pytest.raises(ConfigError) as caught:
        resolve(family, {**tiny_config(family), key: value})
    assert caught.value.what == f"'{key}' holds a value that cannot be"
    assert caught.value.where == "config.json"
    assert caught.value.expected == expected


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_a_number_that_float32_has_for_zero_is_refused(key: str) -> None:
    family = catalog().load("mixtral")
    for value in (2e-309, -1e-40):
        with pytest.raises(ConfigError, match=f"'{key}' ") as caught:
            resolve(family, {**tiny_config(family), key: value})
        assert caught.value.found == repr(value)
    parameters = {"rope_parameters": {"rope_type": "default", "rope_theta": 2e-309}}
    with pytest.raises(ConfigError, match="'rope_theta' must be a positive number"):
        resolve(family, {**tiny_config(family), **parameters})


@pytest.mark.parametrize(
    "change",
    [
        {"variants": {"from": None}},
        {"variants": {"from": {"path": "other"}}},
        {"mlp_variants": {"from": "moe"}},
        {"dense_types": {"from": "to"}},
        {"layer_types": [{"kind": "list", "key": "layer_types", "map": {"from": ""}}]},
    ],
)
def test_a_layer_type_may_be_called_as_a_reference_begins(tmp_path: Path, change: dict[str, Any]) -> None:
    name = mutant(tmp_path, change)
    assert check_fast(Catalog([tmp_path]), [name]).ok


@pytest.mark.parametrize("name", [n for n in catalog().names() if catalog().load(n).layer_types])
def test_a_family_whose_layer_types_have_no_variants_is_checked_or_refused(tmp_path: Path, name: str) -> None:
    """Every layer then has the one mixer, or none, which is an error."""
    data = plain(Catalog().load(name))
    data.pop("extends", None)
    has_mixer = data.get("attention") is not None
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**data, "variants": {}}, sort_keys=False))
    report = check_fast(Catalog(bundled=tmp_path), [name])
    problems = "\n".join(report.problems.get(name, []))
    assert ("no layer of the family has a mixer" in problems) == (not has_mixer)
    if has_mixer:
        assert "layer type" not in problems


def test_disabled_dispatch_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def objects(request: Any, policy: Any, limits: Any) -> Any:
        return eligibility.Decline("planted", "nothing", "everything", "remove the plant")

    monkeypatch.setattr(eligibility, "RULES", (objects, *eligibility.RULES))
    report = selfcheck.check_family(catalog().load("mixtral"))
    assert not report.ok
    assert report.steps[-1].name == "fused"
    assert "planted" in report.steps[-1].detail


def test_a_wider_tolerance_would_not_see_a_small_error() -> None:
    """A tenth of a percent of noise on the weights is an error; the tolerance sees it."""
    model, _ = load_model(CASE / "hub")
    mx.random.seed(0)
    noisy = [
        (name, value * (1 + 1e-3 * mx.random.normal(value.shape)))
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(noisy))
    assert not measure(model, CASE / "oracle.npz").ok
    assert TOLERANCE == 1e-4
    assert parity.BOUNDS == {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
    assert selfcheck.AGREE <= 2e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"moe": {"router": {"skore": "softmax"}}},
            r"unknown key 'skore'.*\n.*mutant.yaml:\d+[\s\S]*'score'",
        ),
        ({"moe": {"router": {"quantizable": 3}}}, r"moe.router.quantizable"),
        ({"moe": {"layers": [{"kind": "evry"}]}}, r"moe.layers"),
        ({"extends": "mixtrall"}, r"did you mean mixtral"),
        ({"norm": None}, r"'norm'"),
    ],
)
def test_a_wrong_family_file_names_file_line_and_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    mutant(tmp_path, change)
    with pytest.raises(SpecError, match=message):
        Catalog([tmp_path]).load("mutant")


def test_two_families_for_one_architecture_are_an_error_naming_both(tmp_path: Path) -> None:
    mutant(tmp_path, {"architectures": ["MixtralForCausalLM"]})
    with pytest.raises(RegistryError, match=r"MixtralForCausalLM[\s\S]*mixtral.yaml and .*mutant.yaml"):
        _ = Catalog([tmp_path]).entries
