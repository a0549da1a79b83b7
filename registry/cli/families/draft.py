"""`registry draft`: a first family file for a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.spec.describe import sentence


def draft(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write the file into.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="A family that may not be the base.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Write a first family file from a checkpoint's config and tensor names, with open questions marked.

    Example: registry draft path/to/model --output my_families
    """
    if output is not None and not output.is_dir():
        raise SettingError(
            "the folder for the draft does not exist",
            where="--output",
            found=str(output),
            hint="make it first",
        )
    catalog = open_catalog(families)
    for name in without or ():
        catalog.path(name)
    from mlx_experts.engine.tools.draft import draft_family
    from mlx_experts.registry.checkpoint.hub import local_folder, remote_checkpoint

    folder = local_folder(checkpoint)
    opened = Checkpoint.open(folder, complete=False) if folder else remote_checkpoint(checkpoint, revision)
    result = draft_family(opened, catalog, without or ())
    text = result.to_yaml()
    if json:
        print_json(
            {"family": result.family, "base": result.base, "yaml": text, "questions": result.questions}
        )
    elif output is None:
        print(text, end="")
    if output is not None:
        path = output / f"{result.family}.yaml"
        if path.exists():
            raise SettingError("the draft would replace a file", where=str(path), hint="move it away first")
        path.write_text(text, encoding="utf-8")
        if not json:
            print(f"wrote {path}")
            print(
                sentence(
                    catalog.load(result.base), open_catalog([*(families or []), output]).load(result.family)
                )
            )
            print(f"{len(result.questions)} open questions stand at its end")
            print(f"then: registry check --fast --families {output}")
