"""A checkpoint as its files describe it: config, tensor headers, and what was noticed on the way.

Nothing of a checkpoint is executed and no tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_experts.registry.checkpoint.other_formats import other_format
from mlx_experts.registry.checkpoint.safetensors_header import Header, TensorInfo, read_header
from mlx_experts.registry.checkpoint.shard_index import Source, listed, read_shards
from mlx_experts.registry.checkpoint.strict_json import kind_of, parse_object, short
from mlx_experts.registry.errors import CheckpointError, ConfigError

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
MODELOPT_NAME = "hf_quant_config.json"

# Keys that name Python code in the checkpoint's folder.
_CODE_KEYS = ("auto_map", "model_file")
MAX_JSON_BYTES = 200_000_000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been found and whose headers are sound.

    Args:
        where: the folder or the hub address, for messages.
        folder: the local folder; None for a checkpoint that is still on the hub.
        config: config.json with the end-of-text ids of generation_config.json and a quantisation entry that
            stood elsewhere; the caller may change it.
        tensors: every tensor by its name on disk.
        metadata: the ``__metadata__`` of the files together.
        files: paths or addresses of the tensor files.
        notices: what was ignored and why, one sentence each.
    """

    where: str
    folder: Path | None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    files: tuple[str, ...]
    notices: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path | str, *, complete: bool = True) -> Checkpoint:
        """Read the config and the tensor headers of a local folder.

        Args:
            complete: demand the tensors' bytes; without, files may end right after their headers.

        Raises:
            CheckpointError: a file is missing, damaged or foreign.
            ConfigError: config.json is an object that cannot be used.
        """
        folder = Path(folder)
        return cls.read(FolderSource(folder, complete), folder)

    @classmethod
    def read(cls, source: Source, folder: Path | None) -> Checkpoint:
        """Read a checkpoint from wherever its files are; raises as ``open`` does."""
        config, notices = read_config(source)
        shards = read_shards(source)
        return cls(
            where=source.where(""),
            folder=folder,
            config=config,
            tensors=shards.tensors,
            metadata=shards.metadata,
            files=shards.files,
            notices=(*notices, *shards.notices),
        )

    @property
    def parts(self) -> str:
        """The config and the tensor files, for a message about how they fit."""
        return f"{self.where}: {CONFIG_NAME} and {listed(Path(file).name for file in self.files)}"

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class FolderSource:
    """The files of a local folder."""

    def __init__(self, folder: Path, complete: bool = True) -> None:
        self._folder, self._complete = folder, complete

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def names(self) -> Collection[str]:
        try:
            return {path.name for path in self._folder.iterdir()}
        except OSError as error:
            raise CheckpointError(
                "The checkpoint's folder cannot be read.",
                where=str(self._folder),
                expected="a folder with config.json and *.safetensors",
                found=error.strerror or str(error),
            ) from None

    def read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            # A pipe or a device would never end.
            if not path.is_file():
                raise CheckpointError("A file of the checkpoint is missing.", where=str(path))
            with path.open("rb") as stream:
                raw = stream.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise CheckpointError(
                "A file of the checkpoint cannot be read.",
                where=str(path),
                found=error.strerror or str(error),
            ) from None
        if len(raw) > MAX_JSON_BYTES:
            raise CheckpointError(
                "A JSON file is too long.", where=str(path), expected=f"at most {MAX_JSON_BYTES} bytes"
            )
        return raw

    def headers(self, names: Sequence[str]) -> list[Header]:
        return [read_header(self._folder / name, complete=self._complete) for name in names]


def read_config(source: Source) -> tuple[dict[str, Any], list[str]]:
    """config.json as the engine reads it, and what was noticed.

    The end-of-text ids of generation_config.json win over those of config.json, as in mlx-lm. A
    ``quantization_config`` is looked for in config.json, in its text_config and, as NVIDIA's ModelOpt
    writes it, in hf_quant_config.json.

    Raises:
        CheckpointError: a file is missing or is not JSON.
        ConfigError: a value has the wrong type.
    """
    names = source.names()
    if CONFIG_NAME not in names:
        other = other_format(names)
        raise CheckpointError(
            "The checkpoint has no config.json." if other is None else f"This is {other.what}.",
            where=source.where(""),
            expected=f"a folder with {CONFIG_NAME} and *.safetensors",
            hint="Give the folder that holds config.json and the tensor files."
            if other is None
            else other.hint,
        )
    config = parse_object(source.read(CONFIG_NAME), source.where(CONFIG_NAME), lenient=True)
    notices = [
        f"config.json names code to run ({key}: {short(config[key])}); it is ignored."
        for key in _CODE_KEYS
        if config.get(key) is not None
    ]
    if GENERATION_NAME in names:
        where = source.where(GENERATION_NAME)
        generation = parse_object(source.read(GENERATION_NAME), where, lenient=True)
        if eos := generation.get("eos_token_id"):
            config["eos_token_id"] = _token_ids(eos, where)
    if config.get("quantization_config") is None:
        found = _quantization_elsewhere(source, config)
        config.pop("quantization_config", None)
        if found is not None:
            config["quantization_config"] = found
    for key in ("quantization", "quantization_config"):
        if not isinstance(config.get(key), dict | None):
            raise ConfigError(
                f"config.json's {key} is not an object.",
                where=source.where(CONFIG_NAME),
                found=f"a {kind_of(config[key])}: {short(config[key])}",
            )
    own, other = config.get("quantization"), config.get("quantization_config")
    if own and other and own != other and "quant_method" not in other:
        notices.append("config.json's quantization and quantization_config differ; the first is followed.")
    return config, notices


def _quantization_elsewhere(source: Source, config: dict[str, Any]) -> Any:
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("quantization_config") is not None:
        return text["quantization_config"]
    if MODELOPT_NAME in source.names():
        entry = parse_object(source.read(MODELOPT_NAME), source.where(MODELOPT_NAME), lenient=True)
        return {"quant_method": "modelopt", **entry}
    return None


def _token_ids(value: Any, where: str) -> int | list[int]:
    if type(value) is int or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    raise ConfigError(
        "eos_token_id is no token id.",
        where=where,
        expected="a whole number or a list of them",
        found=short(value),
    )
