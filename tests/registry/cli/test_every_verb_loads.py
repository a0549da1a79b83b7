"""Whatever reads families takes folders with more of them, and files with plugins."""

from __future__ import annotations

import typer
from typer.main import get_command

from mlx_experts.registry.cli import make_app

# What knows shapes and devices only, or the language itself.
WITHOUT = {"schema", "fmt", "tune", "bench", "plugins"}


def commands() -> dict[str, set[str]]:
    group = get_command(make_app())
    assert isinstance(group, typer.core.TyperGroup)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()
    }


def test_every_verb_that_loads_families_takes_folders_and_plugins() -> None:
    for name, options in commands().items():
        if name not in WITHOUT:
            assert {"--families", "--plugin"} <= options, name


def test_what_lists_plugins_takes_a_file_of_one() -> None:
    assert "--plugin" in commands()["plugins"]
