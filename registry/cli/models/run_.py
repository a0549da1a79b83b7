"""`registry run`: a command of mlx-lm with this package's engine under it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mlx_experts.registry.cli.common import Families, Json, Plugins, print_json, print_table


def run(
    context: typer.Context,
    tool: Annotated[
        str | None,
        typer.Argument(
            help="A command of mlx-lm, such as server; without one, all are listed.", metavar="TOOL"
        ),
    ] = None,
    fused: Annotated[
        bool | None, typer.Option("--fused/--no-fused", help="Force or forbid the fused path.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Compute dtype: float32, float16, bfloat16 or stored.")
    ] = None,
    families: Families = None,
    plugin: Plugins = None,
    family: Annotated[str | None, typer.Option("--family", help="Use this family.")] = None,
    json: Json = False,
) -> None:
    """Run a command of mlx-lm on this package's engine. What follows TOOL is the command's own.

    Options of this command stand before TOOL. `mlx.launch` starts `python -m mlx_experts.run TOOL`.

    Example: registry run server --model path/to/model --port 8080
    """
    from mlx_experts.engine.tools.mlx_lm_tools import run_tool, tools

    if tool is None:
        rows = [(each.name, each.module) for each in tools().values()]
        if json:
            print_json([{"name": name, "module": module} for name, module in rows])
        else:
            print_table("commands of mlx-lm", ("name", "module"), rows)
        return
    asked = {"fused": fused, "dtype": dtype, "family": family, "families": tuple(families or ())}
    options = {key: value for key, value in asked.items() if value not in (None, ())}
    run_tool(tool, context.args, tell=_tell, options=options)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
