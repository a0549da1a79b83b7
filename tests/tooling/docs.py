"""The generated pages, written or compared with what stands there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from docs_pages import pages

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.cli.common import Json, print_json
from mlx_experts.registry.errors import CheckFailed, RegistryError, SettingError


def docs(
    root: Annotated[Path, typer.Option("--root", help="The repository.")] = Path("."),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail when a page is stale.")] = False,
    json: Json = False,
) -> None:
    """Write docs/families.md, schema.md, hooks.md, environment.md and robustness.md.

    Example: python tests/tooling/docs.py --check
    """
    if not (root / "families").is_dir():
        raise SettingError("not the repository's root", found=str(root.resolve()), hint="pass --root")
    stale = []
    for name, text in pages(Catalog(), root).items():
        path = root / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if json:
        print_json({"changed": stale, "written": not check})
    elif not check:
        print(f"wrote {', '.join(stale)}" if stale else "every page is up to date")
    if check and stale:
        raise CheckFailed("generated pages are stale", found=", ".join(stale), hint="run `make docs`")


if __name__ == "__main__":
    try:
        typer.run(docs)
    except RegistryError as error:
        sys.exit(f"error: {error}")
