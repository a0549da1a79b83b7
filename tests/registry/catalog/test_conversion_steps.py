"""Conversions in short: several paths in one step, and what all of its paths begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.conversion_steps import KEEPING, RENAMING
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.spec.checkpoint import VERBS

HEAD = "family: my_moe\nextends: qwen3_moe\nreference: a test\narchitectures: [MyMoe]\n"


def steps(folder: Path, text: str) -> Any:
    """The conversions of a family whose file has this text below its head."""
    (folder / "my_moe.yaml").write_text(HEAD + text)
    return Catalog([folder]).load("my_moe").checkpoint.conversions


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("[{rename: {b: x, a: y, c: b}}]", "[{rename: b, to: x}, {rename: a, to: y}, {rename: c, to: b}]"),
        ("[{rename: {.a: .b}, layer_shift: 1}]", "[{rename: .a, to: .b, layer_shift: 1}]"),
        ("[{conv: [.a.weight, .b.weight]}]", "[{conv: .a.weight}, {conv: .b.weight}]"),
        ("[{conv: {.a: .b, .c: .d}}]", "[{conv: .a, to: .b}, {conv: .c, to: .d}]"),
        ("[{reshape: [.a, .b]}]", "[{reshape: .a}, {reshape: .b}]"),
        (
            "[{split: {.a: [.b, .c], .d: [.e, .f]}, interleaved: true}]",
            "[{split: .a, to: [.b, .c], interleaved: true}, {split: .d, to: [.e, .f], interleaved: true}]",
        ),
        ("[{pick: {.a: .b, .c: .d}, row: 1}]", "[{pick: .a, to: .b, row: 1}, {pick: .c, to: .d, row: 1}]"),
        (
            "[{in: .mlp, rename: {w1: gate_proj, 'x.*': '*'}}]",
            "[{rename: .mlp.w1, to: .mlp.gate_proj}, {rename: '.mlp.x.*', to: '.mlp.*'}]",
        ),
        ("[{in: .m, rename: a, to: b}]", "[{rename: .m.a, to: .m.b}]"),
        ("[{in: .m, split: {a: [b, c]}}]", "[{split: .m.a, to: [.m.b, .m.c]}]"),
        ("[{in: model.m, reshape: [a, b]}]", "[{reshape: model.m.a}, {reshape: model.m.b}]"),
        (
            "[{rename: {rope: model.rope, activation: a}}]",
            "[{rename: rope, to: model.rope}, {rename: activation, to: a}]",
        ),
    ],
)
def test_a_step_of_several_paths_is_those_steps(tmp_path: Path, short: str, whole: str) -> None:
    found = [steps(tmp_path, f"checkpoint: {{conversions: {text}}}\n") for text in (short, whole)]
    assert found[0] == found[1]
    assert found[0]


def test_a_named_list_of_steps_gives_its_steps(tmp_path: Path) -> None:
    text = (
        "define:\n  parts:\n    - rename: {.a: .b, .c: .d}\n    - {conv: .e}\n"
        "checkpoint: {conversions: [{reshape: .x}, $parts, {reshape: .y}]}\n"
    )
    whole = "[{reshape: .x}, {rename: .a, to: .b}, {rename: .c, to: .d}, {conv: .e}, {reshape: .y}]"
    assert steps(tmp_path, text) == steps(tmp_path, f"checkpoint: {{conversions: {whole}}}\n")


def test_which_steps_can_take_several_follows_from_what_they_are() -> None:
    renaming, keeping = [], []
    for verb, model in VERBS.items():
        to = next((info for info in model.model_fields.values() if info.alias == "to"), None)
        if verb != "plugin":
            renaming += [verb] if to is not None else []
            keeping += [verb] if to is None or not to.is_required() else []
    assert (sorted(RENAMING), sorted(KEEPING)) == (sorted(renaming), sorted(keeping))


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("    - rename:\n        .a: .b\n        .c: a b\n", "'checkpoint.conversions.1.to'", 9),
        ("    - rename:\n        .a: .b\n        c d: .c\n", "'checkpoint.conversions.1.rename'", 9),
        (
            "    - rename: {.a: .b}\n    - conv:\n        - .c\n        - 3\n",
            "'checkpoint.conversions.2.conv'",
            10,
        ),
        ("    - conv: [.a, .b]\n    - {renam: .c}\n", "'checkpoint.conversions.2'", 8),
        ("    - rename: [.a, .b]\n", "'checkpoint.conversions.0.rename'", 7),
        ("    - {rename: {.a: .b}, to: .c}\n", "'checkpoint.conversions.0.rename'", 7),
        ("    - {rename: {}}\n", "'checkpoint.conversions.0.rename'", 7),
        ("    - rename: {.a: .b, .c: .d}\n      layer_shft: 1\n", "unknown key 'layer_shft'", 8),
        ("    - {plugin: absorb_kv, from: .a, in: .b}\n", "unknown key 'in'", 7),
        ("    - {in: 3, conv: .b}\n", "unknown key 'in'", 7),
        ("    - {in: a b, conv: .b}\n", "'checkpoint.conversions.0.conv'", 7),
    ],
)
def test_a_mistake_is_told_at_its_line(tmp_path: Path, text: str, key: str, line: int) -> None:
    with pytest.raises(SpecError) as caught:
        steps(tmp_path, f"checkpoint:\n  conversions:\n{text}")
    assert key in caught.value.what
    assert caught.value.where == f"{tmp_path / 'my_moe.yaml'}:{line}"
