"""What people get wrong in a family file: one message each, at its file and line, saying what to write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.yaml_reader import read_yaml
from mlx_experts.registry.errors import RegistryError, SpecError, UnknownFamilyError

HEAD = (
    "family: my_moe\nextends: qwen3_moe\nreference: a test\nmodel_types: [my_moe]\narchitectures: [MyMoe]\n"
)


def mistake(folder: Path, text: str | bytes, name: str = "my_moe.yaml") -> RegistryError:
    """The error that this file gives, which is about line 6 unless it is about the whole."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RegistryError) as caught:
        Catalog([folder]).load("my_moe")
    return caught.value


def test_the_head_alone_is_a_family(tmp_path: Path) -> None:
    (tmp_path / "my_moe.yaml").write_text(HEAD)
    assert Catalog([tmp_path]).load("my_moe").moe.path == "mlp"


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("moe: [1, 2]", "'moe'", "a mapping"),
        ("moe: null", "'moe'", "a mapping"),
        ("moe: {router: {scale: big}}", "'moe.router.scale'", "a reference {from: key} or a number"),
        ("moe: {router: {scale: .nan}}", "'moe.router.scale'", "a finite number"),
        ("moe: {router: {order: topk}}", "'moe.router.order'", "'score_then_topk' or 'topk_then_score'"),
        ("moe: {layers: [{kind: evry}]}", "'moe.layers.0'", "kind all, list"),
        (
            "checkpoint: {conversions: [{renam: a}]}",
            "'checkpoint.conversions.0'",
            "one of the keys rename, split",
        ),
        ("checkpoint: {ignore: mtp.*}", "'checkpoint.ignore'", "a list"),
        ("attention: {window: -3}", "'attention.window'", "a number of at least 0"),
        ("attention: {qkv_bias: 'no'}", "'attention.qkv_bias'", "true or false"),
        ("config: {hidden_size: {from: ''}}", "'config.hidden_size", "text that is not empty"),
        ("config: {hidden_size: {from: []}}", "'config.hidden_size", "a list that is not empty"),
        ("config: {hidden_size: {from: a, map: {}}}", "'config.hidden_size", "not empty"),
        ("moe: {router: {score: softmx}}", "'moe.router.score'", "'softmax', 'sigmoid'"),
        (
            "moe: {router: {renormalize: {eps: -1.0}}}",
            "'moe.router.renormalize.eps'",
            "a number of at least 0",
        ),
        ("block: {norm_eps: -1}", "'block.norm_eps'", "a number above 0"),
        ("moe: {layers: []}", "'moe.layers'", "a list that is not empty"),
        ("layer_types: []", "'layer_types'", "a list that is not empty"),
        ("layer_types: [{kind: pattern, types: []}]", "'layer_types.0.types'", "a list that is not empty"),
        ("layer_types: [{kind: letters, key: a, map: {}}]", "'layer_types.0.map'", "not empty"),
        ("text_keys: []", "'text_keys'", "a list that is not empty"),
        (
            "checkpoint: {conversions: [{split: a, to: []}]}",
            "'checkpoint.conversions.0.to'",
            "a list that is not empty",
        ),
        (
            "checkpoint: {conversions: [{rename: 'a b', to: c}]}",
            "'checkpoint.conversions.0.rename'",
            "a name on disk",
        ),
        ("attention: {names: {o: a.b}}", "'attention.names.o'", "the name of a module"),
        ("variants: {near: {window: -3}}", "'variants.near.window'", "a number of at least 0"),
        ("variants: {near: {kind: mla, path: a b}}", "'variants.near.path'", "a module path"),
    ],
)
@pytest.mark.report("M8")
def test_a_value_that_cannot_be_says_what_could(tmp_path: Path, line: str, key: str, expected: str) -> None:
    error = mistake(tmp_path, f"{HEAD}{line}\n")
    assert key in error.what
    assert expected in error.expected
    assert error.where == f"{tmp_path / 'my_moe.yaml'}:6"


@pytest.mark.parametrize(
    "path",
    ["'dens!!python/object:os'", "a:b", "'a b'", "a..b", "'.a'", "'a.'", "'a.0'", "é", "'*'", "..", '"a\\n"'],
)
@pytest.mark.parametrize("section", ["dense", "attention", "head", "moe.router", "moe.experts"])
def test_a_module_path_is_names_joined_by_dots(tmp_path: Path, section: str, path: str) -> None:
    """Anything else would build a tree that no tensor's name fits."""
    opening = "".join(f"{{{part}: " for part in section.split(".")[1:])
    text = f"{section.split('.')[0]}: {opening}{{path: {path}}}" + "}" * section.count(".")
    error = mistake(tmp_path, f"{HEAD}{text}\n")
    assert error.what == f"'{section}.path' cannot be this"
    assert error.expected.startswith("a module path")
    assert error.where == f"{tmp_path / 'my_moe.yaml'}:6"


@pytest.mark.parametrize("combine", ["sigmoid_gate", "softmax_mix"])
def test_a_shared_expert_that_is_mixed_in_needs_the_projection_for_it(tmp_path: Path, combine: str) -> None:
    error = mistake(tmp_path, f"{HEAD}moe: {{shared: {{combine: {combine}, gate: null}}}}\n")
    assert "needs `gate`" in str(error)


def test_a_family_without_any_mixer_is_told(tmp_path: Path) -> None:
    without_variants = HEAD.replace("qwen3_moe", "mixtral")
    error = mistake(tmp_path, f"{without_variants}attention: null\nvariants: {{}}\n")
    assert "mixer" in error.what
    assert error.where == f"{tmp_path / 'my_moe.yaml'}:6"


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    error = mistake(tmp_path, f"{HEAD}moe: {{router: {{scor: sigmoid}}}}\n")
    assert error.what == "unknown key 'scor' in 'moe.router'"
    assert "'score'" in error.hint


def test_a_misspelt_reference_is_an_unknown_key(tmp_path: Path) -> None:
    error = mistake(tmp_path, f"{HEAD}moe: {{router: {{scale: {{form: x}}}}}}\n")
    assert error.what == "unknown key 'form' in 'moe.router.scale'"


def test_missing_sections_are_listed_together(tmp_path: Path) -> None:
    error = mistake(tmp_path, HEAD.replace("extends: qwen3_moe\n", "").replace("reference: a test\n", ""))
    assert set(error.expected.split(", ")) == {"reference", "moe"}
    assert "extends" in error.hint


def test_a_number_that_yaml_takes_for_text_is_explained(tmp_path: Path) -> None:
    error = mistake(tmp_path, f"{HEAD}attention: {{rope: {{theta: 1e6}}}}\n")
    assert "as text" in error.hint
    assert "1.0e+06" in error.hint


def test_a_name_that_yaml_takes_for_a_number_is_to_be_quoted(tmp_path: Path) -> None:
    assert "quotes" in mistake(tmp_path, f"{HEAD}norm: {{kind: 5}}\n".replace("a test", "5")).hint


@pytest.mark.parametrize("names", ["my_moe", "[no]", "[1]", "{a: b}"])
def test_names_must_be_a_list_of_names(tmp_path: Path, names: str) -> None:
    error = mistake(tmp_path, HEAD.replace("[my_moe]", names))
    assert "`model_types` is not a list of names" in error.what


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("moe:\n\trouter: {score: sigmoid}\n", "no tabs"),
        ("moe:\n  router:\n   score: sigmoid\n    dtype: float32\n", "indentation"),
        ("moe: !!python/object/apply:os.getcwd []\n", "tags"),
        ("moe: {router: {\n", "brackets"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line(tmp_path: Path, text: str, hint: str) -> None:
    error = mistake(tmp_path, HEAD + text)
    assert "not valid YAML" in error.what
    assert int(error.where.rpartition(":")[2]) > 5
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("moe: {router: {score: a, score: b}}\n", "stands twice"),
        ("norm: &n {kind: rms}\ndense: *n\n", "anchor"),
        ("moe: {<<: {path: mlp}}\n", "merge key"),
        ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "anchor"),
    ],
)
def test_what_yaml_allows_and_a_family_does_not_is_refused(tmp_path: Path, text: str, what: str) -> None:
    error = mistake(tmp_path, HEAD + text)
    assert what in error.what
    assert error.where.startswith(f"{tmp_path / 'my_moe.yaml'}:")


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "my_moe.yaml").write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert Catalog([tmp_path]).load("my_moe").family == "my_moe"


def test_a_file_in_another_encoding_says_which_is_needed(tmp_path: Path) -> None:
    assert mistake(tmp_path, HEAD.encode("utf-16")).expected == "UTF-8"


def test_a_short_file_ending_is_told(tmp_path: Path) -> None:
    error = mistake(tmp_path, HEAD, "my_moe.yml")
    assert isinstance(error, UnknownFamilyError)
    assert "ends in .yaml" in error.hint


@pytest.mark.report("M8")
def test_extending_oneself_is_not_the_suggestion(tmp_path: Path) -> None:
    error = mistake(tmp_path, HEAD.replace("qwen3_moe", "my_moe"))
    assert isinstance(error, SpecError)
    assert "my_moe" not in error.hint


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("{kind: per_expert, path: mlp.experts, projections: [a, b]}", "gate, up, down"),
        ("{kind: split, path: mlp.experts, projections: [a]}", "gate, up, down"),
        (
            "{kind: per_expert, path: mlp.experts, projections: [a, b, c], fused: gate_up}",
            "gate and up in one, down",
        ),
    ],
)
def test_experts_have_as_many_leaves_as_projections(tmp_path: Path, layout: str, expected: str) -> None:
    error = mistake(tmp_path, f"{HEAD}checkpoint: {{experts: [{layout}]}}\n")
    assert error.expected == expected
    assert error.where.endswith(":6")


@pytest.mark.report("M7")
def test_a_mistake_at_an_inherited_key_is_told_in_the_file_that_holds_it(tmp_path: Path) -> None:
    # The base's rotation is of another kind of attention, which has no such options.
    error = mistake(tmp_path, f"{HEAD}attention: {{kind: mla, options: {{}}}}\n")
    file, _, line = error.where.rpartition(":")
    assert Path(file).is_file()
    assert int(line) <= len(Path(file).read_text().splitlines())


@pytest.mark.report("C20")
def test_a_file_longer_than_any_family_is_refused_by_size_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "my_moe.yaml"
    with path.open("wb") as file:
        file.write(HEAD.encode())
        # A hole in the file: nothing of it is written, and nothing of it is read.
        file.truncate(50_000_000)
    for command in (lambda: Catalog([tmp_path]).load("my_moe"), lambda: read_yaml(path)):
        with pytest.raises(SpecError, match="too long") as caught:
            command()
        assert "50000000 bytes" in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", ["*name", "@x", "2001-99-99", "!!python/none", "9" * 60])
def test_what_is_no_value_behind_else_is_named_with_its_line(tmp_path: Path, value: str) -> None:
    error = mistake(tmp_path, HEAD + f"moe:\n  router:\n    scale: 'config.a else {value}'\n")
    assert re.search(r"\.yaml:\d+", str(error))
    assert "`else`" in str(error) or "too long" in str(error)


def test_a_date_that_is_none_is_your_error(tmp_path: Path) -> None:
    assert "not valid YAML" in str(mistake(tmp_path, HEAD + "notes: 2001-99-99\n"))


def test_a_reference_behind_else_is_refused_and_not_taken_for_text(tmp_path: Path) -> None:
    error = mistake(tmp_path, HEAD + "moe: {router: {scale: config.a else config.b}}\n")
    assert "no reference to config.json" in str(error)
    assert "default" in str(error)
