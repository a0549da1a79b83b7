"""`registry draft`: a first family file for a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.cli.common import Families, Json, Plugins, open_catalog, print_json
from mlx_experts.registry.errors import SettingError


def draft(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write the file into.")
    ] = None,
    from_transformers: Annotated[
        str | None,
        typer.Option(
            "--from-transformers",
            metavar="MODEL_TYPE",
            help="Answer what transformers' config class and conversion table of this type say.",
        ),
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
    from mlx_experts.engine.tools.drafts.draft import draft_family, draft_of_original
    from mlx_experts.engine.tools.drafts.original import original
    from mlx_experts.registry.checkpoint.hub import local_folder, remote_checkpoint

    source = original(from_transformers) if from_transformers is not None else None
    if checkpoint is not None:
        folder = local_folder(checkpoint)
        opened = (
            Checkpoint.open(folder, complete=False) if folder else remote_checkpoint(checkpoint, revision)
        )
        result = draft_family(opened, catalog, without or (), source)
    elif source is not None:
        result = draft_of_original(source, catalog, without or ())
    else:
        raise SettingError("nothing to draft from", expected="PATH, --from-transformers MODEL_TYPE, or both")
    text = result.to_yaml()
    path = None if output is None else output / f"{result.family}.yaml"
    if path is not None:
        if path.exists():
            raise SettingError("the draft would replace a file", where=str(path), hint="move it away first")
        path.write_text(text, encoding="utf-8")
    if json:
        print_json(
            {
                "family": result.family,
                "base": result.base or None,
                "nearest": result.source,
                "yaml": text,
                "questions": result.questions,
                "next": None if output is None else result.next_command(output),
            }
        )
    elif output is None:
        print(text, end="")
    else:
        print(f"wrote {path}")
        print(f"nearest to {result.source}{'' if result.base else ', which it does not extend'}")
        for number, question in enumerate(result.questions, 1):
            print(f"{number}. {question}")
        print(f"then: {result.next_command(output)}")
