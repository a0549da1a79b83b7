"""What a family file need not state: nested text settings, and the MLP of layers without experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.spec.family import Family

HEAD = "family: {name}\nreference: a test\n"
BASE = "attention: {rope: half}\nmoe:\n  router: {score: softmax}\n"


def families(folder: Path, base: str, heir: str = "architectures: [Heir]") -> tuple[Family, Family]:
    """A family, and one that extends it."""
    (folder / "base.yaml").write_text(HEAD.format(name="base") + base)
    (folder / "heir.yaml").write_text(HEAD.format(name="heir") + f"extends: base\n{heir}\n")
    catalog = Catalog([folder])
    return catalog.load("base"), catalog.load("heir")


@pytest.mark.parametrize(
    ("head", "nested"),
    [
        ("architectures: [MyForCausalLM]", False),
        ("architectures: [MyForCausalLM, MyForConditionalGeneration]", True),
        ("architectures: [MyForConditionalGeneration]\ntext_config: false", False),
        ("architectures: [MyForCausalLM]\ntext_keys: [llm]", True),
        ("architectures: [MyForCausalLM]\ntext_config: true", True),
    ],
)
def test_a_class_around_a_text_model_nests_its_settings(tmp_path: Path, head: str, nested: bool) -> None:
    assert [f.text_config for f in families(tmp_path, f"{head}\n{BASE}")] == [nested, nested]


def test_an_heir_says_for_itself_whether_settings_are_nested(tmp_path: Path) -> None:
    base = f"architectures: [Base]\n{BASE}"
    assert families(tmp_path, base, "architectures: [HeirForConditionalGeneration]")[1].text_config
    wrapped = f"architectures: [BaseForConditionalGeneration]\n{BASE}"
    assert not families(tmp_path, wrapped, "architectures: [Heir]\ntext_config: false")[1].text_config


@pytest.mark.parametrize(
    ("layers", "dense"),
    [
        ("", False),
        ("  layers: [{kind: all}]\n", False),
        ("  layers: [{kind: all, enabled: config.has_experts else false}]\n", True),
        ("  layers: [mlp_layer_types]\n", True),
        ("  layers: [{kind: from_layer, first: 1}]\n", True),
    ],
)
def test_layers_without_experts_have_a_gated_mlp(tmp_path: Path, layers: str, dense: bool) -> None:
    for family in families(tmp_path, f"architectures: [Base]\n{BASE}{layers}"):
        assert (family.dense is not None) == dense
        assert family.dense is None or (family.dense.kind, family.dense.path) == ("glu", "mlp")


def test_a_family_may_refuse_dense_layers(tmp_path: Path) -> None:
    text = f"architectures: [Base]\ndense: null\n{BASE}  layers: [mlp_layer_types]\n"
    assert [family.dense for family in families(tmp_path, text)] == [None, None]
