"""`registry pack`: a checkpoint whose experts can be read in place, and 4-bit where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, console, print_json


def pack(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or Hugging Face repository id.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write; must be new or empty.")],
    bits: Annotated[int | None, typer.Option("--bits", help="Quantise to so many bits a weight.")] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Weights that share a scale.")
    ] = None,
    mode: Annotated[str, typer.Option("--mode", help="MLX's mode: affine, mxfp4, mxfp8, nvfp4.")] = "affine",
    family: Annotated[str | None, typer.Option("--family", help="Use this family.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    json: Json = False,
    families: Families = None,
    plugin: Plugins = None,
) -> None:
    """Write a checkpoint anew, tensor by tensor, so that its experts can stay in its files.

    Example: registry pack path/to/model --bits 4 --output packed
    """
    from mlx_experts.engine.tools.memory.pack import Quantised
    from mlx_experts.engine.tools.memory.pack import pack as write
    from mlx_experts.registry.checkpoint.hub import resolve_path
    from mlx_experts.registry.cli.progress import shard_progress

    how = None
    if bits is not None or group_size is not None or mode != "affine":
        usual = Quantised.usual(mode)
        how = Quantised(bits or usual.bits, group_size or usual.group_size, mode)
    with shard_progress(quiet=json) as progress:
        notices = write(
            resolve_path(model, revision),
            output,
            quantised=how,
            families=tuple(families or ()),
            family=family,
            progress=progress,
        )
    if json:
        print_json({"output": str(output), "notices": notices})
        return
    for notice in notices:
        console().print(f"note: {notice}")
    console().print(f"wrote {output}")
