"""Opening a checkpoint's folder: config, index and shards, and what is said when they are wrong."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import CheckpointError, ConfigError, RegistryError, TensorError

INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "olmoe", "hidden_size": 8}


def save(folder: Path, files: dict[str, list[str]], config: Any = CONFIG) -> Path:
    """A folder with a config and tensor files, each with the named tensors of shape [2, 4]."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        (folder / "config.json").write_bytes(text)
    for name, tensors in files.items():
        save_file(
            {tensor: np.zeros((2, 4), np.float32) for tensor in tensors}, folder / name, {"format": "mlx"}
        )
    return folder


def index(folder: Path, weight_map: Any) -> Path:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def refused(folder: Path, where: str = "", kind: type[RegistryError] = CheckpointError) -> RegistryError:
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    assert str(folder / where) in caught.value.where
    return caught.value


def test_a_folder_with_one_file_opens(tmp_path):
    checkpoint = Checkpoint.open(save(tmp_path, {"model.safetensors": ["a", "b"]}))
    assert checkpoint.config == CONFIG
    assert sorted(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.tensors["a"].shape == (2, 4)
    assert checkpoint.files == (str(tmp_path / "model.safetensors"),)
    assert checkpoint.metadata == {"format": "mlx"}
    assert checkpoint.total_bytes == 64
    assert checkpoint.notices == ()
    assert checkpoint.folder == tmp_path


def test_other_file_names_are_read_only_without_model_files(tmp_path):
    save(tmp_path, {"weights.safetensors": ["a"]})
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]
    save(tmp_path, {"model.safetensors": ["b"]})
    assert list(Checkpoint.open(tmp_path).tensors) == ["b"]


def test_the_index_decides_and_stale_files_are_noted(tmp_path):
    save(
        tmp_path,
        {
            "model-00001-of-00002.safetensors": ["a", "extra"],
            "model-00002-of-00002.safetensors": ["b", "a"],
            "model.safetensors": ["a", "b", "stale"],
        },
    )
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.tensors) == ["a", "b", "extra"]
    assert checkpoint.tensors["a"].file.endswith("model-00001-of-00002.safetensors")
    assert len(checkpoint.files) == 2
    notices = "\n".join(checkpoint.notices)
    assert "another copy of a" in notices
    assert "does not list 1 tensors of its shards: extra" in notices
    assert "Ignored because the index does not name them: model.safetensors." in notices


def test_absent_shards_are_named_before_any_tensor(tmp_path):
    save(tmp_path, {"model-00001-of-00003.safetensors": ["a"]})
    index(tmp_path, {"a": "model-00001-of-00003.safetensors", "b": "model-00003-of-00003.safetensors"})
    error = refused(tmp_path, INDEX)
    assert "absent" in error.what
    assert error.found == "no model-00003-of-00003.safetensors"


def test_numbered_files_must_be_complete_without_an_index(tmp_path):
    save(tmp_path, {"model-00002-of-00003.safetensors": ["a"]})
    assert refused(tmp_path).found == "no model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"
    many = refused(save(tmp_path / "many", {"model-7-of-99999999999.safetensors": ["a"]}))
    assert many.found.startswith("no model-1-of-99999999999.safetensors")
    assert many.found.endswith("and 1 more")
    from_zero = save(tmp_path / "zero", {f"model-0000{i}-of-00002.safetensors": [f"t{i}"] for i in (0, 1)})
    assert len(Checkpoint.open(from_zero).tensors) == 2


def test_a_tensor_that_the_index_places_in_a_shard_without_it_is_named(tmp_path):
    save(tmp_path, {"model.safetensors": ["a"]})
    error = refused(
        index(tmp_path, {"a": "model.safetensors", "lost": "model.safetensors"}), INDEX, TensorError
    )
    assert error.expected == "lost in model.safetensors"


def test_one_tensor_in_two_files_is_refused(tmp_path):
    error = refused_anywhere(save(tmp_path, {"model-a.safetensors": ["w"], "model-b.safetensors": ["w"]}))
    assert error.where == "w"
    assert "model-a.safetensors" in error.found
    assert "model-b.safetensors" in error.found


def refused_anywhere(folder: Path) -> RegistryError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..",
        "",
        "model.bin",
        ".safetensors",
        "a\0.safetensors",
        7,
        None,
    ],
)
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(name, tmp_path):
    save(tmp_path / "inside", {"model.safetensors": ["a"]})
    save(tmp_path, {"model.safetensors": ["a"]})
    error = refused(index(tmp_path / "inside", {"a": name}), INDEX)
    assert "cannot be a shard" in error.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cannot be parsed"),
        ("[]", "does not hold an object"),
        ("{}", "no weight_map"),
        ('{"weight_map": null}', "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "cannot be parsed"),
        ('{"weight_map": {"a": NaN}}', "cannot be parsed"),
    ],
)
def test_an_index_that_is_no_index_is_refused(text, what, tmp_path):
    save(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / INDEX).write_text(text)
    assert what in refused(tmp_path, INDEX).what


def test_a_folder_without_tensor_files_says_what_it_holds_instead(tmp_path):
    save(tmp_path, {})
    assert refused(tmp_path).found == ""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    error = refused(tmp_path)
    assert error.found == "pytorch_model.bin"
    assert "Convert" in error.hint


def test_files_without_a_single_tensor_are_refused(tmp_path):
    save(tmp_path, {"model.safetensors": []})
    assert "no tensor" in refused(tmp_path).what


def test_a_damaged_shard_is_named(tmp_path):
    save(tmp_path, {"model-a.safetensors": ["a"], "model-b.safetensors": ["b"]})
    path = tmp_path / "model-b.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert "cut short" in refused(tmp_path, "model-b.safetensors").what


def test_a_link_to_nowhere_is_a_missing_file(tmp_path):
    save(tmp_path, {})
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "missing" in refused(tmp_path, "model.safetensors").what


def test_missing_folders_and_configs_are_named(tmp_path):
    assert "folder cannot be read" in refused(tmp_path / "nowhere").what
    assert "no config.json" in refused(save(tmp_path, {"model.safetensors": ["a"]}, None)).what
    (tmp_path / "config.json").mkdir()
    assert "missing" in refused(tmp_path, "config.json").what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "cannot be parsed"),
        (b"{", "cannot be parsed"),
        (b"[1]", "does not hold an object"),
        (b'"x"', "does not hold an object"),
        (b"\xff\xfe{\0}\0", "not UTF-8"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "nested"),
        (b'{"a": 1, "a": 2}', "cannot be parsed"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be parsed"),
    ],
)
def test_a_config_that_is_no_config_is_refused(text, what, tmp_path):
    assert what in refused(save(tmp_path, {"model.safetensors": ["a"]}, text), "config.json").what


def test_a_byte_order_mark_and_numbers_beyond_json_are_read(tmp_path):
    text = (
        b'\xef\xbb\xbf{"a": Infinity, "b": NaN, "c": {"__float__": "-Infinity"}, "d": [{"__float__": "NaN"}],'
        b' "e": {"__float__": "one"}, "f": {"__float__": "NaN", "g": 1}, "h": 1, "h": 1}'
    )
    config = Checkpoint.open(save(tmp_path, {"model.safetensors": ["a"]}, text)).config
    assert config["a"] == math.inf
    assert math.isnan(config["b"])
    assert config["c"] == -math.inf
    assert math.isnan(config["d"][0])
    assert config["e"] == {"__float__": "one"}
    assert config["f"] == {"__float__": "NaN", "g": 1}
    assert config["h"] == 1


@pytest.mark.parametrize("eos", [5, [5, 6]])
def test_the_end_of_text_ids_of_the_generation_config_win(eos, tmp_path):
    save(tmp_path, {"model.safetensors": ["a"]}, {**CONFIG, "eos_token_id": 1})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert Checkpoint.open(tmp_path).config["eos_token_id"] == eos


def test_a_generation_config_without_them_changes_nothing(tmp_path):
    save(tmp_path, {"model.safetensors": ["a"]}, {**CONFIG, "eos_token_id": 1})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null, "temperature": 0.6}')
    assert Checkpoint.open(tmp_path).config == {**CONFIG, "eos_token_id": 1}


def test_a_damaged_generation_config_is_named(tmp_path):
    save(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "five"}')
    refused(tmp_path, "generation_config.json", ConfigError)
    (tmp_path / "generation_config.json").write_text("{")
    refused(tmp_path, "generation_config.json")


def test_a_quantisation_entry_is_found_where_exporters_put_it(tmp_path):
    entry = {"quant_method": "fp8"}
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    files = {"model.safetensors": ["a"]}
    nested = save(
        tmp_path / "1", files, {"quantization_config": None, "text_config": {"quantization_config": entry}}
    )
    assert Checkpoint.open(nested).config["quantization_config"] == entry
    (nested / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert Checkpoint.open(nested).config["quantization_config"] == entry
    separate = save(tmp_path / "2", files, {"text_config": None})
    (separate / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert Checkpoint.open(separate).config["quantization_config"] == {"quant_method": "modelopt", **modelopt}
    null = save(tmp_path / "3", files, {"quantization_config": None})
    assert "quantization_config" not in Checkpoint.open(null).config


def test_a_quantisation_entry_that_is_no_object_is_refused(tmp_path):
    save(tmp_path, {"model.safetensors": ["a"]}, {"quantization": [4, 64]})
    assert "quantization is not an object" in refused(tmp_path, "config.json", ConfigError).what


def test_code_in_a_checkpoint_is_not_run_and_a_notice_says_so(tmp_path):
    save(
        tmp_path,
        {"model.safetensors": ["a"]},
        {**CONFIG, "model_file": "evil.py", "auto_map": {"AutoModel": "evil.Model"}},
    )
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    checkpoint = Checkpoint.open(tmp_path)
    assert not marker.exists()
    assert "evil.py" in "\n".join(checkpoint.notices)
    assert "auto_map" in "\n".join(checkpoint.notices)


def test_a_file_without_its_tensors_opens_when_asked(tmp_path):
    save(tmp_path, {})
    header = json.dumps(
        {"a": {"dtype": "BF16", "shape": [1000, 1000], "data_offsets": [0, 2_000_000]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "cut short" in refused(tmp_path, "model.safetensors").what
    assert Checkpoint.open(tmp_path, complete=False).total_bytes == 2_000_000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
SHARD_NAMES = st.sampled_from(["model.safetensors", "../model.safetensors", "x.safetensors"]) | VALUES


@given(
    weight_map=st.dictionaries(st.sampled_from("ab") | st.text(max_size=3), SHARD_NAMES, max_size=3) | VALUES
)
def test_any_index_is_followed_or_refused(weight_map, tmp_path_factory):
    folder = index(save(tmp_path_factory.mktemp("fuzz"), {"model.safetensors": ["a", "b"]}), weight_map)
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        message = error.render()
    else:
        message = checkpoint.where
        assert set(weight_map.values()) == {"model.safetensors"}
    assert str(folder) in message


CONFIG_KEYS = st.sampled_from(
    ["quantization_config", "quantization", "text_config", "model_file", "auto_map", "eos_token_id"]
)


@given(config=st.dictionaries(CONFIG_KEYS | st.text(max_size=8), VALUES, max_size=4) | VALUES)
def test_any_config_is_read_or_refused(config, tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("fuzz"), {"model.safetensors": ["a"]}, json.dumps(config).encode())
    try:
        message = Checkpoint.open(folder).where
    except (CheckpointError, ConfigError) as error:
        message = error.render()
    assert str(folder) in message


@given(
    name=st.sampled_from(
        ["config.json", "generation_config.json", INDEX, "model.safetensors", "hf_quant_config.json"]
    ),
    content=st.binary(max_size=200),
)
def test_random_bytes_in_any_file_are_refused_with_its_name(name, content, tmp_path_factory):
    folder = index(
        save(tmp_path_factory.mktemp("fuzz"), {"model.safetensors": ["a"]}), {"a": "model.safetensors"}
    )
    (folder / name).write_bytes(content)
    with pytest.raises(RegistryError) as caught:
        Checkpoint.open(folder)
    assert str(folder / name) in caught.value.where
