"""Checkpoints of a hub that runs on loopback: downloaded, looked into, and refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.hub import remote_checkpoint, resolve_path
from mlx_experts.registry.errors import CheckpointError

REPO = "someone/tiny-moe"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sharded checkpoint with the files that must not travel."""
    folder = tmp_path / "origin"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "olmoe"}')
    (folder / "original" / "params.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"x": np.zeros(4, np.float32)}, folder / "consolidated.safetensors")
    save_file({"x": np.zeros(4, np.float32)}, folder / "original" / "model.safetensors")
    weight_map = {}
    for shard in (1, 2):
        name = f"model-0000{shard}-of-00002.safetensors"
        tensors = {f"layers.{shard}.{i}": np.zeros((16, 64), np.float16) for i in range(40)}
        save_file(tensors, folder / name, {"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refused(name: str, revision: str | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as downloading:
        resolve_path(name, revision)
    with pytest.raises(CheckpointError) as looking:
        remote_checkpoint(name, revision)
    assert downloading.value.what == looking.value.what
    assert name in downloading.value.where
    assert name in looking.value.where
    return downloading.value


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert resolve_path(tmp_path) == tmp_path
    assert resolve_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/no-such-folder", "a/b/c", "..\\x"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(name, hub):
    with pytest.raises(CheckpointError, match="folder does not exist"):
        resolve_path(name)


def test_a_path_object_is_never_a_repository(hub):
    with pytest.raises(CheckpointError, match="folder does not exist"):
        resolve_path(Path(REPO))


def test_a_file_is_refused_with_its_folder_as_the_hint(folder):
    with pytest.raises(CheckpointError, match="not a file") as caught:
        resolve_path(folder / "config.json")
    assert str(folder) in caught.value.hint


def test_a_download_brings_what_is_needed_and_no_code(hub, folder):
    hub.repos[REPO] = folder
    path = resolve_path(REPO)
    assert sorted(file.name for file in path.rglob("*")) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert len(Checkpoint.open(path).tensors) == 80


def test_weights_under_another_name_are_downloaded_when_there_are_no_others(hub, folder):
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    hub.repos[REPO] = folder
    assert [path.name for path in resolve_path(REPO).glob("*.safetensors")] == ["consolidated.safetensors"]


def test_a_downloaded_checkpoint_opens_while_the_hub_is_away(hub, folder):
    hub.repos[REPO] = folder
    first = resolve_path(REPO)
    hub.repos.clear()
    assert resolve_path(REPO) == first


def test_looking_into_a_repository_reads_its_headers_and_little_else(hub, folder):
    save_file({"big": np.zeros((512, 1024), np.float32)}, folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    hub.repos[REPO] = folder
    looked, local = remote_checkpoint(REPO), Checkpoint.open(folder)
    assert {
        name: (info.dtype, info.shape, info.begin, info.end) for name, info in looked.tensors.items()
    } == {name: (info.dtype, info.shape, info.begin, info.end) for name, info in local.tensors.items()}
    assert looked.config == local.config
    assert looked.metadata == local.metadata
    assert looked.folder is None
    assert looked.files[0] == f"hf://{REPO}/model-00001-of-00002.safetensors"
    assert hub.sent < 600_000 < local.total_bytes
    assert not (folder.parent / "hub_cache").exists()


def test_a_header_longer_than_the_first_request_is_read_to_its_end(hub, folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    tensors = {
        f"model.layers.{i}.mlp.experts.{i}.gate_proj.weight": np.zeros(1, np.int8) for i in range(3000)
    }
    save_file(tensors, folder / "model.safetensors")
    hub.repos[REPO] = folder
    assert set(remote_checkpoint(REPO).tensors) == set(tensors)
    hub.ranges = False
    with pytest.raises(CheckpointError, match="does not serve parts of files"):
        remote_checkpoint(REPO)


def test_a_hub_without_ranges_is_read_as_far_as_needed(hub, folder):
    hub.repos[REPO] = folder
    hub.ranges = False
    assert len(remote_checkpoint(REPO).tensors) == 80


@pytest.mark.parametrize("content", [b"", b"GGUF\0\0\0\0\0\0", b"\xff" * 64])
def test_a_damaged_remote_file_is_named(content, hub, folder):
    (folder / "model-00002-of-00002.safetensors").write_bytes(content)
    hub.repos[REPO] = folder
    with pytest.raises(CheckpointError) as caught:
        remote_checkpoint(REPO)
    assert caught.value.where == f"hf://{REPO}/model-00002-of-00002.safetensors"


def test_a_repository_that_does_not_exist_is_named(hub):
    assert "no such hub repository" in refused("nobody/nothing").what


def test_a_revision_that_does_not_exist_is_named(hub, folder):
    hub.repos[REPO] = folder
    error = refused(REPO, "v9")
    assert "no such revision" in error.what
    assert error.where == f"{REPO} at v9"


def test_a_gated_repository_says_where_to_go(hub, folder):
    hub.repos[REPO] = folder
    hub.gated.add(REPO)
    assert "hf auth login" in refused(REPO).hint


@pytest.mark.parametrize("name", ["no spaces allowed", "a--b", "x" * 200])
def test_a_name_that_is_no_repository_id_is_refused_without_a_request(name, hub):
    assert "neither a folder nor a repository id" in refused(name).what


def test_a_hub_that_cannot_be_reached_says_so(hub):
    hub.close()
    with pytest.raises(CheckpointError, match="cannot be reached"):
        resolve_path(REPO)
    with pytest.raises(CheckpointError, match="did not answer"):
        remote_checkpoint(REPO)


def test_offline_mode_says_which_variable_to_unset(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "cannot be reached" in in_a_process(f"resolve_path({REPO!r})")
    assert "HF_HUB_OFFLINE" in in_a_process(f"remote_checkpoint({REPO!r})")


def test_a_full_disk_is_called_one_and_a_second_try_works(hub, folder):
    hub.repos[REPO] = folder
    # A limit on the size of a file fails the write in the way that a full disk does.
    message = in_a_process(f"resolve_path({REPO!r})", limit=20_000)
    assert "no room on the disk" in message
    assert "HF_HUB_CACHE" in message
    assert len(Checkpoint.open(resolve_path(REPO)).tensors) == 80


def in_a_process(call: str, limit: int | None = None) -> str:
    """The message of the CheckpointError that a call raises in a process of its own."""
    script = (
        "from mlx_experts.registry.checkpoint.hub import *\n"
        f"try:\n    {call}\nexcept CheckpointError as error:\n    print(error)"
    )

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, preexec_fn=restrict
    )
    return done.stdout
