"""The public ways to get a model: from a folder or a hub id, with or without its tokenizer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, overload

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_tokenizer, save_config
from mlx_lm.utils import save_model as save_mlx_lm_model
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import logging as transformers_logging

from mlx_experts.engine.loading.checkpoint_loader import LoadReport, Progress, load_checkpoint
from mlx_experts.engine.loading.expert_memory import has_slots
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.hub import resolve_path
from mlx_experts.registry.checkpoint.other_formats import other_format
from mlx_experts.registry.checkpoint.safetensors_header import read_header
from mlx_experts.registry.checkpoint.shard_index import INDEX_NAME, listed
from mlx_experts.registry.checkpoint.strict_json import parse_object
from mlx_experts.registry.errors import CheckpointError, SettingError
from mlx_experts.registry.spec.family import Family

_LOG = logging.getLogger("mlx_experts")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which a folder with a tokenizer holds one."""


def load_model(
    path_or_hf_repo: str | Path,
    *,
    lazy: bool = False,
    fused: bool | None = None,
    dtype: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    families: tuple[Path, ...] = (),
    family: Family | str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    mtp: bool = False,
    expert_memory: str | int | None = None,
    experts_per_token: int | None = None,
    cpu_activations: str | None = None,
) -> tuple[LanguageModel, dict[str, Any]]:
    """Load a model from a folder or a Hugging Face repository.

    What did not go as the checkpoint says is logged as warnings of the logger `mlx_experts`.

    Args:
        path_or_hf_repo: a checkpoint folder, or a repository id.
        lazy: leave the arrays unevaluated.
        fused: True or False to force or forbid the fused path; None for the policy.
        dtype: compute dtype, `stored` for the checkpoint's own; None for float32 on the CPU and the
            checkpoint's own elsewhere.
        model_config: entries that replace those of config.json.
        families: further folders with family files.
        family: use this family, or the one of this name, whatever the config says.
        revision: a branch, tag or commit of the repository.
        progress: called with (shards read, shards in all, file name).
        mtp: keep the checkpoint's first next-token prediction layer, which ``stream_generate(..., mtp=True)``
            drafts with.
        expert_memory: memory for experts, such as `4GB` or a number of bytes; what it does not hold stays in
            the checkpoint's files and is read when a token picks it. None loads all.
        experts_per_token: experts that a token picks, instead of what the config says.
        cpu_activations: what the CPU's kernels multiply activations as, `float32` or `int8`; None leaves the
            choice to the environment.

    Returns:
        The model and its config.

    Raises:
        RegistryError: whatever is wrong with the checkpoint or an argument.
    """
    model, config, report = load_with_report(
        path_or_hf_repo,
        lazy=lazy,
        fused=fused,
        dtype=dtype,
        model_config=model_config,
        families=families,
        family=family,
        revision=revision,
        progress=progress,
        mtp=mtp,
        expert_memory=expert_memory,
        experts_per_token=experts_per_token,
        cpu_activations=cpu_activations,
    )
    _tell(report, path_or_hf_repo)
    return model, config


def _tell(report: LoadReport, source: str | Path) -> None:
    """Log what a load has decided against what the checkpoint says, so that nobody has to ask for it."""
    for notice in report.notices:
        _LOG.warning("%s: %s", source, notice)


def load_with_report(
    path_or_hf_repo: str | Path, *, revision: str | None = None, **options: Any
) -> tuple[LanguageModel, dict[str, Any], LoadReport]:
    """As :func:`load_model`, with the report of what the load did."""
    folder = resolve_path(path_or_hf_repo, revision)
    return load_checkpoint(Checkpoint.open(folder), **options)


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    return_config: Literal[False] = False,
    **options: Any,
) -> tuple[LanguageModel, TokenizerWrapper]: ...


@overload
def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    return_config: Literal[True],
    **options: Any,
) -> tuple[LanguageModel, TokenizerWrapper, dict[str, Any]]: ...


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    return_config: bool = False,
    adapter_path: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Load a model and its tokenizer, as ``mlx_lm.load`` does; further options are :func:`load_model`'s.

    Args:
        path_or_hf_repo: a checkpoint folder, or a repository id.
        tokenizer_config: settings of the tokenizer.
        return_config: return the config as well.
        adapter_path: a folder of adapters as mlx-lm writes them.
        revision: a branch, tag or commit of the repository.
        trust_remote_code: an argument of mlx-lm's; code of a checkpoint is never run here.

    Returns:
        The model and mlx-lm's tokenizer wrapper, ready for ``generate`` and ``stream_generate``.

    Raises:
        RegistryError: whatever is wrong with the checkpoint or an argument.
    """
    if trust_remote_code:
        raise SettingError("code that a checkpoint carries is never run", found="trust_remote_code=True")
    folder = resolve_path(path_or_hf_repo, revision)
    model, config, report = load_checkpoint(Checkpoint.open(folder), **options)
    _tell(report, path_or_hf_repo)
    if adapter_path is not None:
        put_adapters(model, Path(adapter_path))
    tokenizer = read_tokenizer(folder, config, tokenizer_config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def put_adapters(model: LanguageModel, folder: Path) -> None:
    """Wrap the layers that a folder of mlx-lm's adapters names, and fill the adapters.

    Raises:
        CheckpointError: the folder is not one of adapters, or they are not complete or not for this model.
    """
    file = folder / "adapters.safetensors"
    if not file.is_file():
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        other = other_format(names)
        raise CheckpointError(
            "this is no folder of adapters"
            if other is None
            else f"the adapter that was given is {other.what}",
            where=str(folder),
            expected="adapters.safetensors and adapter_config.json, as mlx_lm.lora writes them",
            found="no such folder" if not folder.is_dir() else listed(sorted(names)) or "an empty folder",
            hint="" if other is None else other.hint,
        )
    stored = read_header(file).tensors
    try:
        load_adapters(model, str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the adapters cannot be put into the model",
            where=str(folder),
            expected="adapter_config.json and adapters.safetensors as mlx-lm writes them for this model",
            found=f"{type(error).__name__}: {error}"[:300],
        ) from error
    leaves = [name for name, _ in tree_flatten(model.parameters()) if name.endswith((".lora_a", ".lora_b"))]
    if lacking := [name for name in leaves if name not in stored]:
        raise CheckpointError(
            "the adapters are not complete", where=str(file), expected=listed(lacking), found="no such tensor"
        )
    model.eval()


def read_tokenizer(
    folder: Path, config: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> TokenizerWrapper:
    """The tokenizer of a checkpoint folder; code that the folder may carry is never run.

    Raises:
        CheckpointError: the folder has no tokenizer that can be read; a file that is no JSON is named.
    """
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise CheckpointError(
            "the checkpoint has no tokenizer",
            where=str(folder),
            expected="tokenizer.json beside config.json",
            hint="copy the tokenizer's files from the original checkpoint",
        )
    for path in sorted(folder.iterdir()):
        # A pipe would be waited for without end, and a device be read without end.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError("the checkpoint holds what is no file", where=str(path), expected="a file")
    settings = {**(extra or {}), "trust_remote_code": False}
    try:
        with _quiet_transformers():
            tokenizer = load_tokenizer(folder, settings, eos_token_ids=config.get("eos_token_id"))
        # Some faults of the files show in use only.
        tokenizer.decode(tokenizer.encode("a"))
        return tokenizer
    except BaseException as error:
        if not _of_the_files(error):
            raise
        suspects = _suspects(folder, error)
        refused = _refused_config(folder, config) if len(suspects) != 1 else None
        if refused is not None:
            raise CheckpointError(
                "transformers refuses config.json, which it reads before the tokenizer",
                where=str(folder / "config.json"),
                found=refused,
                hint="correct the keys that it names; the tokenizer's files may be sound",
            ) from error
        raise CheckpointError(
            "the tokenizer cannot be read",
            where=", ".join(map(str, suspects)),
            found=f"{type(error).__name__}: {error}"[:300],
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without what transformers logs of a config that only the tokenizer is looked up by."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _refused_config(folder: Path, config: Mapping[str, Any]) -> str | None:
    """What transformers says of a config.json of a type that it knows, where it refuses it; or None."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        return f"model_type is {model_type!r}, which is no name"[:300]
    if model_type not in CONFIG_MAPPING:
        return None
    try:
        with _quiet_transformers():
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def _of_the_files(error: BaseException) -> bool:
    """Whether an error may come from damaged files; the tokenizers library panics past ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _suspects(folder: Path, error: BaseException) -> list[Path]:
    """The files that a tokenizer's error may come from: one where that can be told, else all of them.

    Raises:
        CheckpointError: one is no JSON.
    """
    present = [file for file in (folder / name for name in _TOKENIZER_FILES) if file.is_file()]
    for file in present:
        parse_object(file.read_bytes(), str(file), lenient=True)
    template, whole = folder / "chat_template.jinja", folder / "tokenizer.json"
    if isinstance(error, UnicodeDecodeError) and template.is_file():
        return [template]
    if whole in present:
        try:
            Tokenizer.from_file(str(whole)).encode("a")
        except BaseException as fault:
            if not _of_the_files(fault):
                raise
            return [whole]
    return present or [folder]


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files and the generation config of a checkpoint into another folder."""
    for path in sorted(source.iterdir()):
        kept = path.name in (*_TOKENIZER_FILES, "generation_config.json", "merges.txt", "chat_template.jinja")
        if path.is_file() and (kept or path.suffix in (".model", ".tiktoken")):
            shutil.copyfile(path, folder / path.name)


class _Written(nn.Module):
    """A model as mlx-lm's writer sees it: its modules, and tensors under the names on disk."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self._model = model

    def parameters(self) -> dict[str, Any]:
        return dict(self._model.converter.written(dict(tree_flatten(self._model.parameters()))))

    def leaf_modules(self) -> Any:
        return self._model.leaf_modules()

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        """Let go of the model's arrays, which is all that the writer asks for."""
        return self._model.update(tree_map(lambda _: mx.array([]), self._model.parameters()))


def save_tensors(folder: Path, model: LanguageModel, *, donate_model: bool = False) -> None:
    """Write a model's tensors and their index as this package and mlx-lm load them, and no config.

    Args:
        donate_model: let the model's arrays go while they are written; it is of no use afterwards.

    Raises:
        SettingError: some experts of the model stay in the files that it was loaded from.
    """
    if has_slots(model):
        raise SettingError(
            "a model whose experts stay in files cannot be written",
            hint="load it without expert_memory, or use `registry pack`",
        )
    save_mlx_lm_model(folder, _Written(model), donate_model=donate_model)


def save_model(folder: str | Path, model: LanguageModel, config: Mapping[str, Any]) -> None:
    """Write a model as a checkpoint folder that this package and mlx-lm load.

    The folder may be the one that the model was loaded from, lazily too: everything is read and written
    before anything there is replaced.

    Args:
        folder: made if absent; files of the same names are replaced, and weight files of an older checkpoint
            (``model*.safetensors`` and their index) are removed, since mlx-lm reads whatever matches.
        model: a model that this package built.
        config: the config that :func:`load_model` returned.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    # Nothing half-written stands under its own name, whatever interrupts.
    with TemporaryDirectory(prefix=".writing-", dir=path) as part:
        save_tensors(Path(part), model)
        save_config(dict(config), config_path=Path(part) / "config.json")
        # What is lazy and not on disk in the same form would be read from files that go.
        mx.eval(model.parameters())
        written = sorted(Path(part).iterdir(), reverse=True)
        for file in written:
            file.replace(path / file.name)
        names = {file.name for file in written}
        # Last, when all that takes their place is there.
        for stale in (*path.glob("model*.safetensors"), *path.glob(INDEX_NAME)):
            if stale.name not in names:
                stale.unlink()
