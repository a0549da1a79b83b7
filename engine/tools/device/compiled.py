"""MLX's folder of compiled kernels, lent to several processes.

MLX reads a file there that another process has not finished. So each has a folder of its own, which begins
with what the machine has kept. What it has added is kept when it has answered for the last time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

# MLX's variable for the folder.
VARIABLE = "MLX_PTX_CACHE_DIR"


def kept() -> Path:
    """The folder that MLX uses on this machine, whether it is there or not."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "ptx"


def lend(folder: Path) -> None:
    """Make a process's folder, with all files that are kept. Both share a file's bytes where the disk can."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in _files(kept()):
        to = folder / file.relative_to(kept())
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, to)
        except OSError:
            shutil.copyfile(file, to)


def keep(folders: Iterable[Path]) -> None:
    """Keep what processes have added to their folders.

    MLX looks for a kernel's ``.ptx`` file first, so it comes last, and whole.
    """
    home = kept()
    for folder in folders:
        for file in sorted(_files(folder), key=lambda f: f.suffix == ".ptx"):
            to = home / file.relative_to(folder)
            if to.exists():
                continue
            to.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=to.parent, prefix=".", delete=False) as made:
                made.write(file.read_bytes())
            os.replace(made.name, to)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
