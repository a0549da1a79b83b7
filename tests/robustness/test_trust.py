"""Nothing that a checkpoint carries is run, and its names are never paths."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import mlx_experts
from mlx_experts.engine.loading.api import read_tokenizer
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.cli import run
from mlx_experts.registry.errors import CheckpointError


def write_tokenizer(folder: Path, **settings: Any) -> None:
    words = {f"w{i}": i for i in range(95)} | {"<unk>": 95}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def armed(lab: Any, tmp_path: Path) -> Path:
    """A checkpoint that names Python code of its own everywhere; the code leaves a file `marker`."""
    model, config = lab.tiny("qwen3_moe")
    code = {f"Auto{kind}": "evil.Evil" for kind in ("Config", "Model", "ModelForCausalLM", "Tokenizer")}
    # Of a type that transformers does not know, which is where it turns to a checkpoint's code.
    config |= {"model_type": "qwen9_exp", "model_file": "evil.py", "auto_map": code}
    folder = lab.write(tmp_path / "armed", lab.parameters(model), config)
    (folder / "evil.py").write_text(f"open({str(folder / 'marker')!r}, 'w').close()\nclass Evil: pass\n")
    write_tokenizer(folder)
    return folder


@pytest.mark.report("SEC-01")
def test_code_in_a_checkpoint_is_named_and_not_run(armed: Path, lab: Any, capsys: Any) -> None:
    _, tokenizer = mlx_experts.load(armed)
    assert tokenizer.encode("w3 w4") == [3, 4]
    assert any("model_file" in notice for notice in lab.load(armed)[2].notices)
    assert run(["inspect", str(armed)]) == 0
    assert "model_file" in capsys.readouterr().out
    assert run(["generate", str(armed), "--prompt", "w1", "--max-tokens", "2"]) == 0
    assert not (armed / "marker").exists()


@pytest.mark.report("SEC-01", "SEC-03")
def test_a_tokenizer_of_its_own_code_is_refused_and_not_asked_about(armed: Path) -> None:
    write_tokenizer(armed, auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="EvilTokenizer")
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        mlx_experts.load(armed)
    assert not (armed / "marker").exists()


@pytest.mark.report("SEC-03")
@pytest.mark.parametrize("asked", [None, {}, {"trust_remote_code": False}, {"trust_remote_code": True}])
def test_no_callee_is_told_to_trust_a_checkpoint(
    asked: dict[str, Any] | None, armed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = transformers.AutoTokenizer.from_pretrained

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append(options.get("trust_remote_code"))
        return original(*arguments, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", spy)
    read_tokenizer(armed, {}, asked)
    assert seen == [False]


@pytest.mark.report("SEC-08")
@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\\b", "..\\x", "a/../b", "a\0b", "", "x" * 600])
def test_a_tensor_whose_name_could_be_a_path_is_refused(name: str, lab: Any, tmp_path: Path) -> None:
    _, config = lab.tiny("mixtral")
    entry = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    folder = lab.write(tmp_path / "inside", {"a": mx.zeros(1)}, config)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(entry)) + entry + b"\0")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="name cannot be used"):
        Checkpoint.open(folder)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.report("SEC-10")
@pytest.mark.parametrize("length", [4, 24, 4096])
def test_a_file_of_another_format_is_named_whole_or_cut_short(length: int, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("mixtral")
    folder = lab.write(tmp_path, lab.parameters(model), config)
    (folder / "model.safetensors").write_bytes((b"GGUF" + bytes(range(1, 256)) * 20)[:length])
    with pytest.raises(CheckpointError, match="GGUF file") as caught:
        mlx_experts.load_model(folder)
    assert "model.safetensors" in caught.value.where
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(CheckpointError, match=r"GGUF model, which llama\.cpp reads"):
        mlx_experts.load_model(folder)
