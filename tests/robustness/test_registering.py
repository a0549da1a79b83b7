"""The catalogue is the one list of families: it says where each is from and needs no other list."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_experts
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import SpecError, UnknownFamilyError

ROOT = Path(__file__).parent.parent.parent


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.report("REG-01")
@pytest.mark.parametrize("text", [False, True])
def test_an_unknown_model_type_names_its_neighbours_and_how_to_add_it(
    text: bool, lab: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"model_type": "glm4_moe_lyte", "architectures": ["Glm4MoeLyteForCausalLM"]}
    config = {**names, "text_config": names} if text else names
    folder = lab.write(tmp_path, {"a": mx.zeros(4)}, config)
    for command in (["inspect", str(folder)], ["generate", str(folder), "--prompt", "w1"]):
        assert run(command) == 1
        said = capsys.readouterr().err
        assert "glm4_moe_lite" in said
        assert "Glm4MoeLyteForCausalLM" in said
        assert "registry draft" in said
    with pytest.raises(UnknownFamilyError):
        mlx_experts.get_model_classes(config)


@pytest.mark.report("REG-03")
def test_every_list_of_families_is_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    names = catalog().names()
    assert [row["family"] for row in listed(capsys, "list")] == names
    assert [path.stem for path in sorted((ROOT / "families").glob("*.yaml"))] == names
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8").split("## Planted mistakes")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == names
    for name in names:
        entry = catalog().entries[name]
        for model_type in entry.model_types:
            assert model_type in json.dumps(listed(capsys, "show", name))
        for architecture in entry.architectures if entry.when is None else ():
            assert mlx_experts.get_model_classes({"architectures": [architecture]})


@pytest.mark.report("REG-05")
def test_a_family_says_which_file_it_came_from_and_two_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "birch_moe.yaml"
    own.write_text(
        "family: birch_moe\nextends: mixtral\nmodel_types: [birch_moe]\narchitectures: []\n"
        "reference: a test\n"
    )
    rows = {row["family"]: row["file"] for row in listed(capsys, "list", "--families", str(tmp_path))}
    assert rows["birch_moe"] == str(own)
    assert Path(rows["mixtral"]).samefile(ROOT / "families" / "mixtral.yaml")
    assert listed(capsys, "show", "birch_moe", "--families", str(tmp_path))["file"] == str(own)
    shadow = tmp_path / "mixtral.yaml"
    shadow.write_text((ROOT / "families" / "mixtral.yaml").read_text())
    with pytest.raises(SpecError, match="two files describe the family 'mixtral'") as caught:
        Catalog([tmp_path]).names()
    assert str(shadow) in caught.value.where
    assert rows["mixtral"] in caught.value.where


@pytest.mark.report("REG-07")
def test_building_needs_no_configuration_class_of_transformers(lab: Any) -> None:
    """A fresh process in which transformers knows no model at all."""
    script = (
        "import transformers.models.auto.configuration_auto as auto\n"
        "auto.CONFIG_MAPPING_NAMES.clear()\n"
        "import mlx.core as mx\n"
        "from mlx_experts.engine.models.known_families import catalog\n"
        "from mlx_experts.engine.tools.family_check import build_tiny\n"
        "from mlx_experts.registry.resolve.tiny_config import tiny_config\n"
        "for name in ('kimi_linear', 'lara_mini', 'qwen3_moe'):\n"
        "    family = catalog().load(name)\n"
        "    model = build_tiny(family, tiny_config(family) | {'model_type': 'newer_than_all'})\n"
        "    assert mx.isfinite(model(mx.array([[1, 2]]))).all().item()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
