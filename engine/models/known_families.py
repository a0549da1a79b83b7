"""The catalogue that loading uses: bundled families, the environment's folders, plugins' folders."""

from __future__ import annotations

import functools
from pathlib import Path

from mlx_experts.plugins.manager import family_folders
from mlx_experts.registry.catalog.catalog import Catalog


@functools.cache
def catalog(*folders: Path) -> Catalog:
    """The catalogue, read once for each list of extra folders."""
    return Catalog([*family_folders(), *folders])
