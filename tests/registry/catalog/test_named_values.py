"""Values with names: `define`, the standard ones, and mappings that extend them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.shorthand import standard_values
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec.family import Family

HEAD = "family: my_moe\nextends: qwen3_moe\nreference: a test\narchitectures: [MyMoe]\n"


def family(folder: Path, text: str) -> Family:
    (folder / "my_moe.yaml").write_text(HEAD + text)
    return Catalog([folder]).load("my_moe")


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        (
            "define: {r: {score: sigmoid, scale: 2.0}}\nmoe: {router: {extends: $r, scale: 3.0}}",
            "moe: {router: {score: sigmoid, scale: 3.0}}",
        ),
        (
            "define: {r: {renormalize: {enabled: true, eps: 1.0e-20}}}\n"
            "moe: {router: {extends: $r, renormalize: config.norm else false}}",
            "moe: {router: {renormalize: {enabled: config.norm else false, eps: 1.0e-20}}}",
        ),
        (
            "define: {a: {score: sigmoid}, b: {extends: $a, scale: 2.0}}\nmoe: {router: {extends: $b}}",
            "moe: {router: {score: sigmoid, scale: 2.0}}",
        ),
        (
            "define: {g: {groups: {count: 4, keep: 2, score: max}}}\n"
            "moe: {router: {extends: $g, groups: null}}",
            "moe: {router: {groups: null}}",
        ),
        (
            "define: {b: {x: 1, y: {z: 1}}}\nblock: {kind: some, options: {extends: $b, y: {w: 2}}}",
            "block: {kind: some, options: {x: 1, y: {z: 1, w: 2}}}",
        ),
        ("define: {noaux_tc: {score: softmax}}\nmoe: {router: $noaux_tc}", "moe: {router: {score: softmax}}"),
        (
            "define: {i: [x.*, y.*]}\ncheckpoint: {ignore: [a, $i, b]}",
            "checkpoint: {ignore: [a, x.*, y.*, b]}",
        ),
    ],
)
def test_a_mapping_is_the_one_that_it_extends_with_changes(tmp_path: Path, short: str, whole: str) -> None:
    assert family(tmp_path, short) == family(tmp_path, whole)


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("moe:\n  router:\n    extends: $noaux\n", "`define` has no 'noaux'", 7),
        ("moe:\n  router:\n    extends: noaux_tc\n", "'moe.router.extends' names no mapping", 7),
        ("define: {x: 3}\nmoe:\n  router:\n    extends: $x\n", "'moe.router.extends' names no mapping", 8),
        ("define: {x: {extends: $x}}\nmoe: {router: $x}\n", "a named value needs itself", 5),
        ("define:\n  x:\n    scor: 1\nmoe: {router: {extends: $x}}\n", "unknown key 'scor'", 7),
        (
            "checkpoint:\n  define:\n    s:\n      - {conv: .a}\n      - {rename: .b}\n  conversions: $s\n",
            "a key is missing in 'checkpoint.conversions.1'",
            9,
        ),
        ("define: {i: [x.*, 3]}\ncheckpoint:\n  ignore:\n    - a\n    - $i\n", "'checkpoint.ignore.2'", 5),
    ],
)
def test_a_mistake_is_told_at_its_line(tmp_path: Path, text: str, what: str, line: int) -> None:
    with pytest.raises(SpecError) as caught:
        family(tmp_path, text)
    assert what in caught.value.what
    assert caught.value.where == f"{tmp_path / 'my_moe.yaml'}:{line}"


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    # The anchor takes the place of the name.
    with pytest.raises(SpecError, match="a name in `define` is no text") as caught:
        family(tmp_path, "define:\n &x: {score: softmax}\nmoe: {router: $x}\n")
    assert caught.value.where == str(tmp_path / "my_moe.yaml")


def test_named_values_are_no_part_of_a_family(tmp_path: Path) -> None:
    assert family(tmp_path, "define: {unused: 1}\n").define == {}
    assert Catalog().load("nemotron_h").define == {}


def test_every_standard_value_is_used_by_families_and_describes_its_section(tmp_path: Path) -> None:
    used = "\n".join(path.read_text() for path in Catalog().folders[0].glob("*.yaml"))
    assert [name for name in standard_values() if f"${name}" not in used] == []
    router = family(tmp_path, "moe: {router: $noaux_tc}").moe.router
    assert router.model_dump(exclude_unset=True).keys() >= standard_values()["noaux_tc"].keys()
    assert yaml.safe_dump(standard_values()).count("config.") > 10
