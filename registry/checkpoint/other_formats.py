"""Tells what a folder or a file is that is not a checkpoint in safetensors, and what to do with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath


@dataclass(frozen=True)
class OtherFormat:
    """What somebody took for a checkpoint.

    Args:
        what: what it is, as a noun phrase.
        hint: what to do with it.
    """

    what: str
    hint: str


_GGUF = OtherFormat(
    "a GGUF model, which llama.cpp reads",
    "Give the safetensors checkpoint that it was made from; its repository's card names it.",
)
_PEFT = OtherFormat(
    "a PEFT adapter, without the model that it belongs to",
    "Merge it with peft's merge_and_unload and save the whole model, or train one with mlx_lm.lora.",
)
_LORA = OtherFormat(
    "a LoRA adapter of mlx-lm, without the model that it belongs to",
    "Give the model's folder, and this one as the adapter (adapter_path=… or --adapter).",
)
_BIN = OtherFormat(
    "a checkpoint in PyTorch's pickle format, which can run code when it is read",
    "Convert it to safetensors: load it with transformers and call save_pretrained.",
)
_MISTRAL = OtherFormat(
    "a checkpoint in Mistral's own layout (params.json)",
    "Give the repository's files in Hugging Face's layout: config.json and model*.safetensors.",
)
_DIFFUSERS = OtherFormat(
    "a pipeline of several models (model_index.json)", "Give the sub-folder that holds the language model."
)
_PARENT = OtherFormat("a folder of downloaded repositories", "Give the folder below snapshots/.")

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def other_format(names: Collection[str]) -> OtherFormat | None:
    """What a folder with files of these names is, or None where nothing tells.

    Args:
        names: names at the top of the folder.
    """
    if "adapter_model.safetensors" in names or "adapter_model.bin" in names:
        return _PEFT
    if "adapters.safetensors" in names:
        return _LORA
    if any(fnmatchcase(name, "*.gguf") for name in names):
        return _GGUF
    if "params.json" in names and "config.json" not in names:
        return _MISTRAL
    if "model_index.json" in names and "config.json" not in names:
        return _DIFFUSERS
    if {"snapshots", "refs"} <= set(names):
        return _PARENT
    has_tensors = any(fnmatchcase(name, "*.safetensors") for name in names)
    if not has_tensors and any(fnmatchcase(name, glob) for name in names for glob in _PICKLES):
        return _BIN
    return None


def other_file(name: str) -> OtherFormat | None:
    """What a single file is that somebody took for a checkpoint, or None where nothing tells."""
    return other_format({PurePath(name).name})
