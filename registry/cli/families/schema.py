"""`registry schema` and `registry fmt`: what family files may say, and their one form."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from mlx_experts.registry.catalog.yaml_reader import SCHEMA_FILE
from mlx_experts.registry.cli.common import Json, print_json
from mlx_experts.registry.errors import CheckFailed, SettingError


def schema(json: Json = True) -> None:
    """Print the JSON Schema of a family file, for editors.

    Example: registry schema > family.schema.json
    """
    text = resources.files("mlx_experts.families").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    print(text, end="")


def fmt(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Family files, or folders of them; the bundled ones when none is named."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail when a file has another form.")
    ] = False,
    json: Json = False,
) -> None:
    """Write family files in their one form: key order, lines, references. Comments stay.

    Example: registry fmt my_families --check
    """
    from mlx_experts.registry.catalog.catalog import bundled_folder
    from mlx_experts.registry.catalog.family_format import formatted
    from mlx_experts.registry.catalog.yaml_reader import read_text

    changed = []
    for path in _family_files(files or [bundled_folder()]):
        text = read_text(path)
        wanted = formatted(text, path)
        if text != wanted:
            changed.append(str(path))
            if not check:
                path.write_text(wanted, encoding="utf-8")
    if json:
        print_json({"changed": changed, "written": not check})
    elif not check:
        print("\n".join(f"wrote {name}" for name in changed) or "every file has its form")
    if check and changed:
        raise CheckFailed(
            "family files are not in their one form", found="\n".join(changed), hint="run `registry fmt`"
        )


def _family_files(given: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            found += sorted(path.glob("*.yaml"))
        elif path.exists():
            found.append(path)
        else:
            raise SettingError("there is no such family file", found=str(path))
    return found
