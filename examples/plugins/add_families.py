"""A folder of family files that a package brings along.

An installed package names the folder beside its module; `--families FOLDER` does the same for one command.
"""

from pathlib import Path

from mlx_experts.plugins.hookspecs import hookimpl


@hookimpl
def add_families() -> list[Path]:
    return [Path(__file__).parent / "families"]
