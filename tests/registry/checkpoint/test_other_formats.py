"""What is no safetensors checkpoint is named for what it is, with the next step."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from mlx_experts import batch_generate, load
from mlx_experts.engine.loading.api import read_tokenizer
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.hub import local_folder
from mlx_experts.registry.checkpoint.other_formats import other_format
from mlx_experts.registry.checkpoint.strict_json import parse_object
from mlx_experts.registry.errors import CheckpointError, SettingError

DEMO = Path(str(files("mlx_experts").joinpath("demo")))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["model-q4_k_m.gguf"], "GGUF"),
        (["config.json", "model.gguf"], "GGUF"),
        (["pytorch_model.bin", "config.json"], "pickle"),
        (["pytorch_model-00001-of-00002.bin", "config.json", "pytorch_model.bin.index.json"], "pickle"),
        (["consolidated.00.pth", "params.json"], "Mistral's own layout"),
        (["adapters.safetensors", "adapter_config.json"], "LoRA adapter of mlx-lm"),
        (["adapter_model.safetensors", "adapter_config.json"], "PEFT adapter"),
        (["adapter_model.bin", "adapter_config.json"], "PEFT adapter"),
        (["model_index.json"], "pipeline of several models"),
        (["blobs", "refs", "snapshots"], "downloaded repositories"),
    ],
)
@pytest.mark.report("M3")
def test_a_folder_is_named_for_what_it_is(tmp_path: Path, names: list[str], what: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    if "config.json" in names:
        shutil.copy(DEMO / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=what) as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.hint
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize("names", [[], ["README.md"], ["config.json", "model.safetensors"]])
def test_nothing_is_said_of_a_folder_that_nothing_tells(names: list[str]) -> None:
    assert other_format(names) is None


def test_pickles_beside_safetensors_do_not_make_a_pickle_checkpoint() -> None:
    assert other_format(["config.json", "model.safetensors", "training_args.bin"]) is None


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"GGUF.*llama\.cpp"):
        local_folder(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("names", "what"), [(["adapter_model.safetensors"], "PEFT"), ([], "no folder of")])
@pytest.mark.report("M3")
def test_an_adapter_that_is_none_is_named(tmp_path: Path, names: list[str], what: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=what):
        load(DEMO, adapter_path=str(tmp_path))
    with pytest.raises(CheckpointError, match="no such folder"):
        load(DEMO, adapter_path=str(tmp_path / "missing"))


@pytest.mark.parametrize("name", [None, 3, ["a"], "", "  "])
@pytest.mark.report("M12")
def test_what_names_no_checkpoint_is_an_argument_error(name: object) -> None:
    with pytest.raises(SettingError):
        load(name)  # type: ignore[call-overload]


@pytest.mark.report("M12")
def test_a_batch_may_be_of_texts_and_gives_what_ids_give() -> None:
    model, tokenizer = load(DEMO)
    texts = ["A mixture", "The router"]
    ids = [tokenizer.encode(text) for text in texts]
    options = {"max_tokens": 6, "verbose": False}
    assert (
        batch_generate(model, tokenizer, texts, **options).texts
        == batch_generate(model, tokenizer, ids, **options).texts
    )
    with pytest.raises(SettingError, match="no list of prompts"):
        batch_generate(model, tokenizer, texts[0], **options)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (b'{\n  // which model\n  "a": 1\n}', "no comments"),
        (b'{\n# which model\n"a": 1\n}', "no comments"),
        (b'{"a": [1, 2,]}', "comma"),
        (b'{"a": 1,\n}', "comma"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b'{"a": 1', "Download the file again"),
    ],
)
@pytest.mark.report("M11")
def test_what_is_no_json_is_told_by_its_habit(text: bytes, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_object(text, "config.json", lenient=True)
    assert hint in caught.value.hint


@pytest.mark.report("M13")
@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", "four"), ("model_type", [])])
def test_a_config_that_transformers_refuses_is_named_and_not_the_tokenizer(
    key: str, value: object, tmp_path: Path
) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    config = json.loads((DEMO / "config.json").read_text())
    config[key] = value
    (tmp_path / "demo" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="transformers refuses config") as caught:
        read_tokenizer(tmp_path / "demo", config)
    assert key in caught.value.found


def test_transformers_does_not_speak_of_another_model_type_in_a_walk_of_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    config = json.loads((DEMO / "config.json").read_text())
    config.pop("rope_scaling", None)
    (tmp_path / "demo" / "config.json").write_text(json.dumps({**config, "model_type": "birch_moe"}))
    read_tokenizer(tmp_path / "demo", config)
    assert "You are using a model of type" not in "".join(capfd.readouterr())
