"""What several verbs share: output as JSON or tables, and options that mean the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_experts.registry.catalog.catalog import Catalog

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Families = Annotated[
    list[Path] | None,
    typer.Option(
        "--families", help="Further folder with family files (may be repeated).", show_default=False
    ),
]


def add_plugin_files(files: list[Path] | None) -> list[Path] | None:
    """Load plugins from files before a verb asks for any.

    Raises:
        PluginError: a file is not there.
    """
    if files:
        from mlx_experts.plugins.manager import add_plugin_file

        for path in files:
            add_plugin_file(path)
    return files


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        help="Python file with a plugin (may be repeated).",
        show_default=False,
        callback=add_plugin_files,
    ),
]


def console() -> Console:
    """A console that does not break long lines when its output is piped."""
    from rich.console import Console

    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=200, no_color=True)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under column heads."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console().print(table)


def open_catalog(folders: list[Path] | None) -> Catalog:
    """The catalogue with plugins' and the given folders.

    Raises:
        SettingError: a folder does not exist.
    """
    from mlx_experts.plugins.manager import family_folders
    from mlx_experts.registry.catalog.catalog import Catalog

    return Catalog([*family_folders(), *(folders or [])])


def versions() -> dict[str, str]:
    """Versions and device that a result belongs to."""
    import platform
    from importlib.metadata import version

    packages = ("mlx-experts", "mlx", "mlx-lm")
    return {**{p: version(p) for p in packages}, "machine": f"{platform.system()} {platform.machine()}"}
