"""Files that go or shrink, and people who interrupt: one clear message, and a second try works."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_mlx_lm_model

from mlx_experts.engine.loading.api import load, load_model, save_model
from mlx_experts.registry.cli import progress, run
from mlx_experts.registry.errors import CheckpointError, RegistryError

FAMILIES = ("qwen3_moe", "deepseek_v3", "dbrx", "qwen3_next")


def sharded(lab: Any, name: str, folder: Path) -> tuple[Path, dict[str, mx.array]]:
    """A family's tiny checkpoint in three files."""
    model, config = lab.tiny(name)
    tensors = lab.parameters(model)
    lab.write(folder, {}, config)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for i in range(3):
        part = {n: tensors[n] for n in names[i::3]}
        mx.save_safetensors(str(folder / f"model-0000{i + 1}-of-00003.safetensors"), part)
    return folder, tensors


def gone(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))


def cut(path: Path) -> None:
    path.with_suffix(".kept").write_bytes(path.read_bytes())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def put_back(path: Path) -> None:
    path.with_suffix(".kept").replace(path)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fault", [gone, cut])
@pytest.mark.parametrize("shard", [2, 3])
def test_a_shard_that_goes_or_shrinks_between_two_shards_is_named_and_a_second_try_works(
    name: str, fault: Any, shard: int, lab: Any, tmp_path: Path
) -> None:
    folder, tensors = sharded(lab, name, tmp_path)
    path = folder / f"model-0000{shard}-of-00003.safetensors"

    def after_the_first(done: int, total: int, file: str) -> None:
        if done == 1:
            fault(path)

    with pytest.raises(CheckpointError) as caught:
        load_model(folder, progress=after_the_first)
    assert str(path) in caught.value.where
    put_back(path)
    model, _ = load_model(folder, dtype="float32")
    assert lab.same(lab.parameters(model), tensors) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shard_that_is_cut_after_all_were_opened_is_named_and_a_second_try_works(
    name: str, lab: Any, tmp_path: Path
) -> None:
    """MLX reads tensors when they are first needed, which is after the last shard was opened."""
    folder, tensors = sharded(lab, name, tmp_path)
    path = folder / "model-00002-of-00003.safetensors"

    def after_the_last(done: int, total: int, file: str) -> None:
        if done == total:
            cut(path)

    with pytest.raises(CheckpointError) as caught:
        load_model(folder, progress=after_the_last)
    assert str(path) in caught.value.where
    put_back(path)
    model, _ = load_model(folder, dtype="float32")
    assert lab.same(lab.parameters(model), tensors) == []


def test_an_interrupted_load_says_so_and_a_second_try_works(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tensors = sharded(lab, "qwen3_moe", tmp_path)
    before = sorted(tmp_path.iterdir())

    @contextmanager
    def interrupting(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
        yield lambda done, total, file: os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress, "shard_progress", interrupting)
    assert run(["generate", str(folder), "--prompt", "w1"]) == 130
    said = capsys.readouterr().err
    assert "interrupted" in said
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before
    model, _ = load_model(folder, dtype="float32")
    assert lab.same(lab.parameters(model), tensors) == []


def test_an_interrupted_save_leaves_what_was_there(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = lab.tiny("qwen3_moe")
    save_model(tmp_path, model, config)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_experts.engine.loading.api.save_config", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path, model, config)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _shards_of(weights: dict[str, mx.array], number: int) -> list[dict[str, mx.array]]:
    names = sorted(weights)
    return [{name: weights[name] for name in names[i::number]} for i in range(number)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2), (2, 2)])
def test_saving_over_an_older_checkpoint_leaves_none_of_its_weights(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, lazy: bool
) -> None:
    first, config = lab.tiny("mixtral", {"head_dim": 16})  # which mlx-lm does not read
    old = lab.parameters(first)
    monkeypatch.setattr("mlx_lm.utils.make_shards", lambda weights: _shards_of(weights, before))
    save_model(tmp_path, first, config)
    others = {"notes.txt": b"mine", "adapters.safetensors": b"x", "tokenizer.json": b"{}"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)

    model, saved = load_model(tmp_path, dtype="float32", lazy=lazy)
    changed = model.model.embed_tokens
    changed.weight = changed.weight + 1
    wanted = {**old, "model.embed_tokens.weight": old["model.embed_tokens.weight"] + 1}
    monkeypatch.setattr("mlx_lm.utils.make_shards", lambda weights: _shards_of(weights, after))
    save_model(tmp_path, model, saved)

    weights = {path.name for path in tmp_path.glob("model*")}
    files = [f"model-{i + 1:05}-of-{after:05}.safetensors" for i in range(after)]
    assert weights == {"model.safetensors.index.json", *(files if after > 1 else ["model.safetensors"])}
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert lab.same(lab.parameters(model), wanted) == []
    assert lab.same(lab.parameters(load_model(tmp_path, dtype="float32")[0]), wanted) == []
    assert lab.same(lab.parameters(load_mlx_lm_model(tmp_path)[0]), wanted) == []


def test_a_stale_index_does_not_outlive_its_checkpoint(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = lab.tiny("qwen3_moe")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )

    def without_index(folder: Path, written: Any, **_: Any) -> None:
        mx.save_safetensors(str(folder / "model.safetensors"), written.parameters())

    monkeypatch.setattr("mlx_experts.engine.loading.api.save_mlx_lm_model", without_index)
    save_model(tmp_path, model, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_save_that_fails_half_way_keeps_every_old_shard(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = lab.tiny("qwen3_moe")
    monkeypatch.setattr("mlx_lm.utils.make_shards", lambda weights: _shards_of(weights, 2))
    save_model(tmp_path, model, config)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write, calls = mx.save_safetensors, []

    def full(file: str, *arguments: Any, **named: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise RuntimeError("no space left")
        write(file, *arguments, **named)

    monkeypatch.setattr("mlx_lm.utils.make_shards", lambda weights: _shards_of(weights, 3))
    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(RuntimeError, match="no space left"):
        save_model(tmp_path, model, config)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_scalar_in_place_of_a_fused_tensor_is_named(lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny("sarvam_moe")
    tensors = {n: v for n, v in lab.parameters(model).items() if "layers.0.self_attn." not in n}
    tensors["model.layers.0.attention.query_key_value.weight"] = mx.array(1.0)
    with pytest.raises(RegistryError, match="query_key_value"):
        load_model(str(lab.write(tmp_path, tensors, config)))


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_tokenizer_that_is_no_file_is_refused_and_never_read(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(str(files("mlx_experts").joinpath("demo")), folder)
    path = folder / "tokenizer.json"
    path.unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(folder)
