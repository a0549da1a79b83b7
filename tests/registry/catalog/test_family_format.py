"""`registry fmt`: one form, the same family, every comment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlx_experts.registry.catalog.catalog import Catalog, bundled_folder
from mlx_experts.registry.catalog.family_format import WIDTH, formatted
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import SpecError

PATH = Path("my_moe.yaml")


def body(text: str) -> str:
    """What the formatter makes of a family with this below its head, without the head."""
    head = "family: my_moe\narchitectures: [MyMoe]\nreference: a test\n"
    return formatted(f"{head}{text}", PATH).split("reference: a test\n", 1)[1].strip("\n")


@pytest.mark.parametrize("path", sorted(bundled_folder().glob("*.yaml")), ids=lambda p: p.stem)
def test_every_family_has_its_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert formatted(text, path) == text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("moe: {router: {score: softmax, path: gate}}", "moe: {router: {path: gate, score: softmax}}"),
        (
            "attention: {qkv_bias: {from: bias, default: false}}",
            "attention: {qkv_bias: config.bias else false}",
        ),
        ("attention: {clip: {from: [a, b]}}", "attention: {clip: config.a or b}"),
        ("config: {top_k: {from: [a, b], default: 2}}", "config: {top_k: a or b else 2}"),
        ("config: {top_k: [a, b]}", "config: {top_k: a or b}"),
        ("attention: {rope: {style: half}}", "attention: {rope: half}"),
        ("attention: {clip: {from: a, map: {x: 1}}}", "attention:\n  clip: {from: a, map: {x: 1}}"),
        (
            "moe: {router: {score: softmax, renormalize: {enabled: true, eps: 1.0e-20}, scale: 2.0}}",
            "moe:\n  router: {score: softmax, renormalize: {enabled: true, eps: 1.0e-20}, scale: 2.0}",
        ),
        ("head: {tied: {from: a, default: false, outer: true}}", "head: {tied: outer.a else false}"),
        (
            "layer_types: [{kind: list, key: a}, {kind: pattern, types: [b]}]",
            "layer_types: [a, {kind: pattern, types: [b]}]",
        ),
        ("head: {tied: 'true'}", 'head: {tied: "true"}'),
        ('names: {embed: "wte"}', "names: {embed: wte}"),
        (
            "checkpoint: {conversions: [{rename: a, to: b}, {rename: c, to: d}, {conv: e}, {conv: f}]}",
            "checkpoint:\n  conversions:\n    - rename: {a: b, c: d}\n    - {conv: [e, f]}",
        ),
        (
            "checkpoint: {conversions: [{rename: a, to: b}, {rename: a, to: d}, {rename: {c: a}}]}",
            "checkpoint:\n  conversions:\n    - {rename: a, to: b}\n    - rename: {a: d, c: a}",
        ),
        (
            "checkpoint: {conversions: [{rename: a, to: b, in: .m}, {rename: c, to: d, in: .m}, {conv: e}]}",
            "checkpoint:\n  conversions:\n    - {in: .m, rename: {a: b, c: d}}\n    - {conv: e}",
        ),
        ("variants:\n  a: {}\n  b: null", "variants: {a: {}, b: null}"),
        ("checkpoint: {ignore: ['*.x', 'a, b']}", 'checkpoint: {ignore: ["*.x", "a, b"]}'),
    ],
)
def test_a_text_gets_its_form(written: str, form: str) -> None:
    assert body(written) == form
    assert body(form) == form


def test_keys_stand_in_the_order_of_the_schema_and_with_the_checkpoint_apart() -> None:
    text = "checkpoint: {ignore: [a]}\nmoe: {router: {score: softmax}}\nnorm: {kind: layer}"
    assert body(text) == "norm: {kind: layer}\nmoe: {router: {score: softmax}}\n\ncheckpoint: {ignore: [a]}"


def test_comments_stay_with_what_they_stand_before() -> None:
    moe = "# of moe\nmoe:\n  # of the router\n  router: {score: softmax}  # beside\n"
    text = f"{moe}norm: {{kind: layer}}\n# last\n"
    assert body(text) == (
        "norm: {kind: layer}\n# of moe\nmoe:\n  # of the router\n  router: {score: softmax}  # beside\n# last"
    )


def test_a_comment_inside_braces_makes_a_block() -> None:
    text = "attention: {qkv_bias: true,\n  # why\n  out_bias: false}"
    assert body(text) == "attention:\n  qkv_bias: true\n  # why\n  out_bias: false"
    text = "attention:\n  rope: {style: half, options: {a: 1,\n    # why\n    b: 2}}"
    assert body(text) == (
        "attention:\n  rope:\n    style: half\n    options:\n      a: 1\n      # why\n      b: 2"
    )


def test_a_comment_parts_conversions() -> None:
    steps = "    - {rename: a, to: b}\n    # why\n    - rename: {c: d, e: f}\n    - {rename: g, to: h}  # too"
    text = f"checkpoint:\n  conversions:\n{steps}"
    assert body(text) == text


def test_named_steps_have_the_form_of_steps() -> None:
    steps = "[{from: .x, plugin: y}, {to: c, rename: b}, {rename: {d: e}}, {rename: {f: g}, in: .m}]"
    text = f"define:\n  a: {steps}"
    assert body(text).splitlines()[2:] == [
        "    - {plugin: y, from: .x}",
        "    - rename: {b: c, d: e}",
        "    - {in: .m, rename: f, to: g}",
    ]
    assert body(body(text)) == body(text)


def test_what_is_extended_stands_first() -> None:
    text = "moe: {router: {scale: 2.0, extends: $noaux_tc}}"
    assert body(text) == "moe: {router: {extends: $noaux_tc, scale: 2.0}}"


def test_braces_inside_braces_stand_at_one_depth() -> None:
    deep = "attention:\n  rope:\n    options: {a: {b: 1}}"
    assert body(deep) == deep
    deeper = "attention:\n  rope: {style: half, options: {a: {b: 1}}}"
    assert body(deeper) == "attention:\n  rope:\n    style: half\n    options: {a: {b: 1}}"


def test_a_part_too_long_for_a_line_starts_one_and_ends_one() -> None:
    """So that what belongs together is seen: the parts after it are not behind its end."""
    keys = ", ".join(f"a_rather_long_key_{i}: {i}" for i in range(6))
    text = body(f"attention:\n  rope: {{style: half, options: {{{keys}}}, entry: x}}")
    assert text.splitlines()[1:] == [
        "  rope: {style: half,",
        "    options: {a_rather_long_key_0: 0, a_rather_long_key_1: 1, a_rather_long_key_2: 2,",
        "      a_rather_long_key_3: 3, a_rather_long_key_4: 4, a_rather_long_key_5: 5},",
        "    entry: x}",
    ]
    assert body(text) == text


def test_long_lines_are_broken_and_read_the_same(tmp_path: Path) -> None:
    note = "word " * 40
    lines = body(f"notes: [{note}]\n# {note}\nexample: {{{', '.join(f'key_{i}: {i}' for i in range(30))}}}")
    assert max(map(len, lines.splitlines())) <= WIDTH
    assert body(lines) == lines


def test_a_long_text_in_quotes_keeps_its_indentation() -> None:
    long = "a place, and " * 9
    written = f'mtp: {{reference: "{long}end", type: full_attention}}'
    assert body(written) == f'mtp:\n  reference: "{long}end"\n  type: full_attention'
    assert body(body(written)) == body(written)


def test_the_form_says_the_same(tmp_path: Path) -> None:
    """A family that is written in the long form is the same one afterwards."""
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        (folder / "my_moe.yaml").write_text(
            "family: my_moe\nreference: a test\narchitectures: [MyMoe]\nmodel_types: [mine]\n"
            "moe: {router: {score: {from: [a, b], default: softmax}, renormalize: {enabled: {from: c}}}}\n"
            "attention: {rope: {theta: {from: t, default: 1.0e+4}, style: half}, qk_norm: {over: head}}\n"
            "checkpoint: {conversions: [{to: .b, rename: .a}, {conv: .c.weight}], ignore: ['*.x']}\n"
        )
    assert run(["fmt", str(after)]) == 0
    assert (after / "my_moe.yaml").read_text() != (before / "my_moe.yaml").read_text()
    assert Catalog([before]).load("my_moe") == Catalog([after]).load("my_moe")


def test_a_default_that_is_a_reference_is_never_written_behind_else() -> None:
    text = (bundled_folder() / "qwen4_exp.yaml").read_text(encoding="utf-8")
    assert "{from: ple_embed_dim, default: config.hidden_size}" in text
    assert formatted(text, PATH) == text


def test_the_check_fails_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(bundled_folder() / "mixtral.yaml", tmp_path)
    file = tmp_path / "mixtral.yaml"
    assert run(["fmt", "--check", str(file)]) == 0
    text = file.read_text().replace("{score: softmax,", "{score:   softmax,")
    file.write_text(text)
    assert run(["fmt", "--check", str(tmp_path)]) == 2
    assert str(file) in capsys.readouterr().err
    assert file.read_text() == text
    assert run(["fmt", str(tmp_path)]) == 0
    assert run(["fmt", "--check", str(tmp_path)]) == 0


def test_what_is_no_family_file_is_refused() -> None:
    with pytest.raises(SpecError, match="not a mapping"):
        formatted("- a\n", PATH)
    assert run(["fmt", "/nowhere/at/all.yaml"]) == 1
