"""Writes a checkpoint anew so that its experts can be read in place, and quantised where that is asked for.

Tensors are read, converted and written one by one: what is in memory at a time is one projection of one
layer's experts, before and after.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import quantize_model, save_config

from mlx_experts.engine.loading.api import copy_tokenizer
from mlx_experts.engine.loading.checkpoint_loader import STORED, Progress, load_checkpoint
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.weights.in_place.writer import write_tensors
from mlx_experts.engine.weights.quantization import AFFINE_BITS, AFFINE_GROUPS, FLOAT_MODES
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import CheckpointError, SettingError


@dataclass(frozen=True)
class Quantised:
    """How modules that are not quantised yet are to be; see MLX's ``quantize``."""

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"

    @classmethod
    def usual(cls, mode: str) -> Quantised:
        """A mode with the bits and the group size that it has, or usually has."""
        return cls(*FLOAT_MODES.get(mode, (4, 64)), mode)

    def check(self) -> None:
        """Hold it to what MLX has.

        Raises:
            SettingError: MLX has no such format.
        """
        affine = self.mode == "affine" and self.bits in AFFINE_BITS and self.group_size in AFFINE_GROUPS
        if not affine and FLOAT_MODES.get(self.mode) != (self.bits, self.group_size):
            pairs = ", ".join(f"{mode} with {b} bits and group {g}" for mode, (b, g) in FLOAT_MODES.items())
            raise SettingError(
                "MLX has no such format",
                expected=f"affine with {AFFINE_BITS} bits and groups of {AFFINE_GROUPS}, {pairs}",
                found=f"{self.mode} with {self.bits} bits and group {self.group_size}",
            )


def pack(
    folder: Path,
    output: Path,
    *,
    quantised: Quantised | None = None,
    families: tuple[Path, ...] = (),
    family: str | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the checkpoint in ``folder`` to ``output`` in the module tree's layout.

    Args:
        output: a folder that is not there, or empty.
        quantised: how modules that are not quantised are to be; None leaves them as they are.
        families: further folders with family files.
        family: use this family whatever the config says.
        progress: called with (tensors written, tensors in all, name).

    Returns:
        What a person should know of it, one sentence each.

    Raises:
        RegistryError: the checkpoint cannot be loaded, the format does not exist, or the disk is full.
            Nothing is left behind then.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingError("the folder to write is there already", where="--output", found=str(output))
    if quantised is not None:
        quantised.check()
    model, config, report = load_checkpoint(
        Checkpoint.open(folder), lazy=True, dtype=STORED, families=families, family=family
    )
    notices = list(report.notices)
    if quantised is not None:
        if report.formats:
            notices.append(f"{len(report.formats)} modules are quantised already and stay as they are")
        with redirect_stdout(StringIO()):  # mlx-lm says the bits a weight there
            model, config = quantize_model(
                model, config, quantised.group_size, quantised.bits, mode=quantised.mode
            )
    tensors = _released(model)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".packing-", dir=output.parent) as room:
            part = Path(room) / "checkpoint"
            part.mkdir()
            write_tensors(part, tensors, progress=progress)
            save_config(dict(config), config_path=part / "config.json")
            copy_tokenizer(folder, part)
            if output.is_dir():
                output.rmdir()
            part.rename(output)
    except OSError as error:
        raise CheckpointError(
            "The checkpoint cannot be written.",
            where=str(output),
            found=error.strerror or str(error),
            hint="Make room or choose another disk; nothing was left behind.",
        ) from None
    return notices


def _released(model: LanguageModel) -> dict[str, mx.array]:
    """The tensors as they are written, which the model lets go; those of a layer stand together."""
    tensors: dict[str, Any] = dict(model.converter.written(dict(tree_flatten(model.parameters()))))
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    return tensors
