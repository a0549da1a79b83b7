"""The JSON Schema accepts what the package accepts, as an editor sees it, and refuses what it refuses."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec.json_schema import family_schema

ROOT = Path(__file__).parents[3]
FAMILIES = sorted((ROOT / "families").glob("*.yaml"))
HEAD = "family: my_moe\narchitectures: [MyMoe]\nreference: a test\n"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = family_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def as_json(text: str) -> Any:
    """A YAML text as JSON has it, whose keys are text."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    return plain(yaml.safe_load(text))


@pytest.mark.parametrize("path", FAMILIES, ids=lambda p: p.stem)
def test_every_family_is_valid(path: Path, validator: Draft202012Validator) -> None:
    found = [f"{e.json_path}: {e.message}"[:300] for e in validator.iter_errors(as_json(path.read_text()))]
    assert found == []


def test_a_family_of_the_docs_and_of_a_plugin_are_valid(validator: Draft202012Validator) -> None:
    page = (ROOT / "docs" / "add-a-family.md").read_text(encoding="utf-8")
    texts = re.findall(r"```yaml\n(.*?)```", page, re.S)
    texts += [p.read_text() for p in (ROOT / "tests" / "plugins").glob("*/*/families/*.yaml")]
    assert len(texts) == 2
    assert [list(validator.iter_errors(as_json(text))) for text in texts] == [[], []]


@pytest.mark.parametrize(
    "text",
    [
        "moe: {router: {scor: softmax}}",
        "extends: qwen3_moe\nmoe: {router: {scor: softmax}}",
        "extends: qwen3_moe\nmoe: {router: {score: softmx}}",
        "extends: qwen3_moe\nmoe: {router: {scale: big}}",
        "extends: qwen3_moe\nmoe: {router: {scale: config.a els 2}}",
        "extends: qwen3_moe\nmoe: {layers: [{kind: evry}]}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{renam: a, to: b}]}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{rename: a}]}",
        "moe: {router: {extends: noaux_tc}}",
        "moe: {router: {extends: $noaux_tc, scor: softmax}}",
        "moe: {router: {groups: {count: 4}, score: softmax}}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{rename: {a: b}, to: c}]}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{rename: [a, b]}]}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{plugin: absorb_kv, from: a, in: b}]}",
        "extends: qwen3_moe\ncheckpoint: {ignore: mtp.*}",
        "extends: qwen3_moe\nattention: {window: -3}",
        "extends: qwen3_moe\nvariants: {near: {windw: 3}}",
        "config: {num_experts: 8}",
        "extends: qwen3_moe\nlayouts: {}",
    ],
)
def test_what_the_package_refuses_is_invalid(
    text: str, validator: Draft202012Validator, tmp_path: Path
) -> None:
    (tmp_path / "my_moe.yaml").write_text(HEAD + text)
    with pytest.raises(SpecError):
        Catalog([tmp_path]).load("my_moe")
    assert not validator.is_valid(as_json(HEAD + text))


@pytest.mark.parametrize(
    "text",
    [
        "moe: {router: {score: softmax}}",
        "moe: {router: {score: config.score or scoring else softmax, renormalize: config.norm else true}}",
        "define: {act: situ}\nmoe: {router: {score: sigmoid}, experts: {activation: {name: $act}}}",
        "extends: qwen3_moe\nattention: {rope: interleaved, qk_norm: null}",
        "extends: mixtral\nattention: {kind: mla, options: {kv_rank: config.kv_lora_rank}}",
        "extends: qwen3_moe\nmoe: {experts: {activation: swiglu}, router: {selection_bias: bias}}",
        "extends: qwen3_moe\nconfig: {top_k: k or kk else 2, num_experts: [a, b], expert_width: w}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{split: .a, to: [.b, .c]}], optional: ['*.x']}",
        "extends: qwen3_moe\ncheckpoint: {conversions: [{in: .m, rename: {a: b, c: d}}, {conv: [.a, .b]}]}",
        "define: {r: {score: sigmoid}}\nmoe: {router: {extends: $r, renormalize: {enabled: true}}}",
        "moe: {router: {extends: $noaux_tc, groups: {count: 4}}}",
        "extends: qwen3_moe\ndefine: {x: [{conv: .a}]}\ncheckpoint: {conversions: [{split: {.a: [.b]}}, $x]}",
    ],
)
def test_what_the_package_takes_is_valid(text: str, validator: Draft202012Validator, tmp_path: Path) -> None:
    whole = HEAD + text + ("" if text.startswith("extends") else "\nattention: {rope: half}")
    (tmp_path / "my_moe.yaml").write_text(whole)
    Catalog([tmp_path]).load("my_moe")
    assert list(validator.iter_errors(as_json(whole))) == []


def test_every_key_is_described() -> None:
    sections = family_schema()["$defs"]
    bare = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section.get("else", section).get("properties", {}).items()
        if not value.get("description")
    ]
    assert bare == []


def test_the_schema_lies_beside_the_families_where_they_name_it() -> None:
    folder = Path(str(resources.files("mlx_experts.families")))
    stated = {path.read_text(encoding="utf-8").splitlines()[0] for path in folder.glob("*.yaml")}
    assert stated == {"# yaml-language-server: $schema=family.schema.json"}
    assert json.loads((folder / "family.schema.json").read_text(encoding="utf-8")) == family_schema()
