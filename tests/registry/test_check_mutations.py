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

from mlx_experts.engine import gates, parity, selfcheck
from mlx_experts.engine.loading import load_model
from mlx_experts.engine.originals import TOLERANCE, measure
from mlx_experts.registry.catalog import Catalog, merge
from mlx_experts.registry.check import check_fast
from mlx_experts.registry.coverage import Known, mlx_lm_families
from mlx_experts.registry.errors import RegistryError, SpecError, TensorError

CASE = Path(__file__).parent.parent / "cases" / "mixtral" / "base"


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
    report = check_fast(Catalog(), known=known)
    assert any("qwen9_moe" in problem for problem in report.problems["coverage"])


def test_a_module_that_only_inherits_its_experts_is_found(tmp_path: Path) -> None:
    (tmp_path / "base_moe.py").write_text("from .switch_layers import SwitchGLU\n")
    (tmp_path / "heir.py").write_text("from . import base_moe\n")
    (tmp_path / "dense.py").write_text("from .base import x\n")
    assert [k.model_type for k in mlx_lm_families(tmp_path)] == ["base_moe", "heir"]


def test_a_broken_layout_pattern_names_the_tensors(tmp_path: Path) -> None:
    layouts = {"experts": [{"kind": "per_expert", "path": "block.experts", "leaves": ["w1", "w3", "w2"]}]}
    name = mutant(tmp_path, {"layouts": layouts})
    with pytest.raises(TensorError, match=r"block_sparse_moe\.experts\.\{n\}\.w1\.weight"):
        load_model(CASE / "hub", families=(tmp_path,), family=name)


def test_a_renamed_leaf_names_the_parameter(tmp_path: Path) -> None:
    name = mutant(tmp_path, {"moe": {"router": {"path": "router"}}})
    with pytest.raises(TensorError, match=r"block_sparse_moe\.(router|gate)\.weight"):
        load_model(CASE / "hub", families=(tmp_path,), family=name)


def test_swapped_gate_and_up_load_and_differ_from_the_original(tmp_path: Path) -> None:
    path = "block_sparse_moe.experts"
    layouts = {"experts": [{"kind": "per_expert", "path": path, "leaves": ["w3", "w1", "w2"]}]}
    name = mutant(tmp_path, {"layouts": layouts})
    model, _ = load_model(CASE / "hub", families=(tmp_path,), family=name)
    measured = measure(model, CASE / "oracle.npz")
    assert not measured.ok
    assert measured.full > 0.01


def test_disabled_dispatch_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def objects(facts: Any, policy: Any, limits: Any) -> Any:
        return gates.Decline("planted", "nothing", "everything", "remove the plant")

    monkeypatch.setattr(gates, "RULES", (objects, *gates.RULES))
    report = selfcheck.check_family(Catalog().load("mixtral"))
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
        ({"moe": {"router": {"form": 3}}}, r"moe.router.form"),
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
