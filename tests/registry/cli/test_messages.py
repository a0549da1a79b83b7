"""What a newcomer is told: of checkpoints that give no text, of slow experts, in narrow terminals."""

from __future__ import annotations

import codecs
import io
import json
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest
from rich.console import Console

from mlx_experts.engine.loading.api import load_with_report
from mlx_experts.engine.tools.drafts.draft import draft_family
from mlx_experts.engine.tools.inspect import inspect
from mlx_experts.engine.weights.audit import audit
from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.unsupported import unsupported
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checks.static_check import check_fast
from mlx_experts.registry.cli import common
from mlx_experts.registry.cli.families import list_
from mlx_experts.registry.errors import SpecError, TensorError, UnknownFamilyError

DEMO = Path(str(files("mlx_experts").joinpath("demo")))


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "demo")
    return tmp_path / "demo"


def changed(folder: Path, **entries: object) -> Path:
    """The folder with entries of its config replaced, those that are None left out."""
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in {**config, **entries}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.report("M1")
def test_a_type_that_is_declared_unsupported_is_refused_with_its_reason(demo: Path) -> None:
    declared = unsupported()
    assert declared
    for model_type, reason in declared.items():
        with pytest.raises(UnknownFamilyError, match="is not supported") as caught:
            inspect(changed(demo, model_type=model_type, architectures=None))
        assert " ".join(reason.split())[:40] in " ".join(caught.value.what.split())
        assert "mlx-lm" in caught.value.hint


@pytest.mark.report("M2")
def test_a_dense_model_is_called_so(demo: Path) -> None:
    changed(demo, model_type="llama", architectures=["LlamaForCausalLM"], quantization=None)
    experts = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "norm_topk_prob",
    )
    changed(demo, **dict.fromkeys((*experts, "mlp_only_layers", "router_aux_loss_coef"), None))
    with pytest.raises(UnknownFamilyError, match="a dense model") as caught:
        inspect(demo)
    assert "mlx_lm.generate" in caught.value.hint
    (demo / "model.safetensors").unlink(missing_ok=True)
    tensors = {"model.embed_tokens.weight": mx.zeros((4, 4)), "model.norm.weight": mx.zeros((4,))}
    for path in demo.glob("*.safetensors*"):
        path.unlink()
    mx.save_safetensors(str(demo / "model.safetensors"), tensors)
    with pytest.raises(UnknownFamilyError, match="no experts: a dense model"):
        draft_family(Checkpoint.open(demo), Catalog())


@pytest.mark.report("M6")
def test_one_broken_family_file_does_not_stop_what_needs_none_of_it(demo: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "broken.yaml").write_text("family: broken\narchitectures: [Broken]\n  reference: [\n")
    (mine / "half.yaml").write_text(
        "family: half\narchitectures: [Half]\nreference: none\nmoe: {routr: {}}\n"
    )
    assert inspect(demo, families=[mine]).loadable
    assert draft_family(Checkpoint.open(demo), Catalog([mine])).source
    checked = check_fast(Catalog([mine]), ["half", "mixtral"])
    assert set(checked.problems) == {"half"}
    with pytest.raises(SpecError, match=r"broken\.yaml"):
        Catalog([mine]).load("broken")


@pytest.mark.report("M9")
def test_inspect_says_that_a_folder_has_no_tokenizer(demo: Path) -> None:
    assert not any("tokenizer" in notice for notice in inspect(demo).notices)
    for path in demo.glob("token*"):
        path.unlink()
    seen = inspect(demo)
    assert seen.loadable
    assert any("there is no tokenizer here" in notice for notice in seen.notices)


@pytest.mark.report("M9")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_inspect_says_which_file_begins_with_a_mark_that_the_tokenizer_refuses(demo: Path, name: str) -> None:
    (demo / name).write_bytes(codecs.BOM_UTF8 + (demo / name).read_bytes())
    assert [n for n in inspect(demo).notices if "byte order mark" in n and n.startswith(name)]


@pytest.mark.report("M14")
def test_a_shape_that_is_wrong_in_every_layer_is_one_line() -> None:
    names = [f"model.layers.{i}.mlp.gate.weight" for i in range(40)]
    wanted, stored = ({name: mx.zeros(shape) for name in names} for shape in ((8, 4), (4, 8)))
    with pytest.raises(TensorError) as caught:
        audit(wanted, stored).check()
    assert caught.value.found.count("gate.weight") == 1
    assert "more patterns" not in caught.value.found


@pytest.mark.report("M15")
def test_experts_that_no_kernel_takes_are_told_once(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_experts.engine.dispatch import eligibility

    _, _, report = load_with_report(demo)
    assert not any("fused kernel" in notice for notice in report.notices)
    limits = eligibility.LIMITS["cpu"]
    narrow = replace(limits, bits={kind: frozenset({1}) for kind in limits.bits})
    monkeypatch.setitem(eligibility.LIMITS, "cpu", narrow)
    _, _, report = load_with_report(demo)
    told = [notice for notice in report.notices if "no fused kernel takes them" in notice]
    assert len(told) == 1
    assert "4 of 4 layers" in told[0]


@pytest.mark.report("M17")
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_name_is_broken_in_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=width, no_color=True)
    monkeypatch.setattr(common, "console", lambda: narrow)
    monkeypatch.setattr(list_, "console", lambda: narrow)
    list_.list_families()
    words = {word.strip(",") for line in out.getvalue().splitlines() for word in line.split()}
    entries = Catalog().entries.values()
    columns = 3 if "architectures" in list_.columns_for(width) else 2
    named = [(e.name, *e.model_types, *(e.architectures if columns == 3 else ())) for e in entries]
    assert {name for names in named for name in names} <= words
    assert max(map(len, out.getvalue().splitlines())) <= width


@pytest.mark.report("M10")
def test_answers_without_layers_say_how_to_get_them(demo: Path, tmp_path: Path) -> None:
    import numpy as np

    from mlx_experts.registry.cli.models.parity import parity
    from mlx_experts.registry.errors import CheckFailed

    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    answers = {"input_ids": np.zeros((1, 4), np.int64), "logits": np.ones((1, 4, vocabulary), np.float32)}
    np.savez(tmp_path / "answers.npz", **answers)
    with pytest.raises(CheckFailed) as caught:
        parity(checkpoint=str(demo), reference=str(tmp_path / "answers.npz"))
    assert "scripts/save_answers.py" in caught.value.hint
    answers["hidden_states"] = np.ones((4, 1, 4, 64), np.float32)
    np.savez(tmp_path / "answers.npz", **answers)
    with pytest.raises(CheckFailed, match="layer 0"):
        parity(checkpoint=str(demo), reference=str(tmp_path / "answers.npz"))


HEAD = "family: mine\nextends: qwen3_moe\nreference: a test\nmodel_types: [mine]\narchitectures: [Mine]\n"


def complaint(folder: Path, line: str) -> str:
    """What the fast check says of a family that extends qwen3_moe, of its sixth line."""
    (folder / "mine.yaml").write_text(f"{HEAD}{line}\n")
    return "\n".join(check_fast(Catalog([folder]), ["mine"]).problems["mine"])


@pytest.mark.report("M7")
def test_a_mixer_that_does_not_exist_is_told_at_the_line_that_names_it(tmp_path: Path) -> None:
    said = complaint(tmp_path, "attention: {kind: gka}")
    assert "mine.yaml:6" in said
    assert "did you mean gqa" in said
    assert "qwen3_moe.yaml" not in said


@pytest.mark.report("M8")
@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("attention: {qk_norm: heads}", "head"),
        ("attention: {rope: {style: interleave}}", "interleaved"),
        ("checkpoint: {experts: [{kind: perexpert}]}", "per_expert"),
    ],
)
def test_a_word_that_is_nearly_one_of_a_few_is_told_the_one(tmp_path: Path, line: str, meant: str) -> None:
    said = complaint(tmp_path, line)
    assert "mine.yaml:6" in said
    assert f"did you mean {meant}" in said


@pytest.mark.report("M8")
def test_a_model_type_of_two_families_is_told_at_the_check(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(HEAD.replace("model_types: [mine]", "model_types: [qwen3_moe]"))
    said = " ".join(
        text for texts in check_fast(Catalog([tmp_path]), ["mine"]).problems.values() for text in texts
    )
    assert "qwen3_moe" in said


@pytest.mark.report("M8")
def test_a_name_in_capitals_is_told_in_small_letters() -> None:
    with pytest.raises(UnknownFamilyError) as caught:
        Catalog().load("QWEN3_MOE")
    assert "did you mean qwen3_moe" in caught.value.hint
