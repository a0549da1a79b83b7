"""The commands `registry` and `mlx-experts`: one verb a file, and one policy for errors.

Exit codes: 0 done, 1 something you gave is wrong, 2 a check did not pass, 3 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from typer.exceptions import TyperException

from mlx_experts.registry.cli.entry import INTERRUPTED
from mlx_experts.registry.errors import RegistryError


class Verb(NamedTuple):
    """Where a verb is defined.

    Args:
        module: below this package.
        function: its name there.
        settings: what click is told of it.
    """

    module: str
    function: str
    settings: dict[str, bool] | None = None


# Everything after the tool's name is the tool's own.
_PASSED_ON = {"allow_extra_args": True, "allow_interspersed_args": False}
VERBS: dict[str, Verb] = {
    "list": Verb("families.list_", "list_families"),
    "show": Verb("families.show", "show"),
    "check": Verb("families.check", "check"),
    "draft": Verb("families.draft", "draft"),
    "diff": Verb("families.diff", "diff"),
    "schema": Verb("families.schema", "schema"),
    "fmt": Verb("families.schema", "fmt"),
    "coverage": Verb("families.coverage", "coverage"),
    "plugins": Verb("families.plugins", "plugins"),
    "inspect": Verb("models.inspect", "inspect"),
    "parity": Verb("models.parity", "parity"),
    "generate": Verb("models.generate", "generate"),
    "run": Verb("models.run_", "run", _PASSED_ON),
    "routing": Verb("models.routing", "routing"),
    "prune": Verb("models.prune", "prune"),
    "pack": Verb("models.pack", "pack"),
    "bench": Verb("devices.bench", "bench"),
    "tune": Verb("devices.tune", "tune"),
}


def make_app(names: Iterable[str] = VERBS) -> typer.Typer:
    """The command line with these verbs; a verb's module is imported here and not before."""
    app = typer.Typer(name="registry", no_args_is_help=True, pretty_exceptions_enable=False)
    for name in names:
        verb = VERBS[name]
        module = importlib.import_module(f"{__name__}.{verb.module}")
        panel = verb.module.partition(".")[0].capitalize()
        function = getattr(module, verb.function)
        app.command(name, context_settings=verb.settings, rich_help_panel=panel)(function)
    app.callback()(_root)
    return app


def _asked(arguments: list[str]) -> Iterable[str]:
    """The one verb that is asked for, or all where help, completion or a mistake needs them."""
    verb = next((each for each in arguments if not each.startswith("-")), "")
    completing = any(name.endswith("_COMPLETE") for name in os.environ)
    # A command line of a single verb would take it for the whole program.
    return (verb, "list" if verb != "list" else "show") if verb in VERBS and not completing else VERBS


def _versions() -> str:
    from mlx_experts.registry.cli.common import versions

    return ", ".join(f"{name} {version}" for name, version in versions().items())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(_versions())
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the versions used."),
    ] = False,
) -> None:
    """Every Mixture-of-Experts family for MLX as one YAML file."""


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; messages go to stderr, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal cannot write is shown as a question mark.
            stream.reconfigure(errors="replace")
    try:
        if arguments == ["--version"]:
            print(_versions())
            return 0
        app = make_app(_asked(arguments))
        result = app(args=arguments, prog_name="registry", standalone_mode=False)
        # A reader of our output that has gone is met here, and not while Python shuts down.
        sys.stdout.flush()
    except RegistryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except TyperException as error:
        # Without any argument the help has been printed and the message is empty.
        if error.format_message():
            print(f"error: {error.format_message()}", file=sys.stderr)
            print("  next:     the option --help shows what the command takes", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except SystemExit as leave:
        # typer leaves so when the reader of our output has gone, which is that reader's right.
        if not isinstance(leave.__context__, BrokenPipeError):
            raise
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.strerror is None:
            return _report(error)
        print(f"error: the system refused: {error.strerror}", file=sys.stderr)
        if error.filename is not None:
            print(f"  where:    {str(error.filename)[:200]}", file=sys.stderr)
        return 1
    except Exception as bug:  # noqa: BLE001 - the outermost frame turns a bug into a report
        return _report(bug)
    if result == INTERRUPTED:
        print("interrupted; nothing half-written was kept", file=sys.stderr)
    return result if isinstance(result, int) else 0


def _report(bug: Exception) -> int:
    from importlib.metadata import version

    with tempfile.NamedTemporaryFile("w", prefix="mlx-experts-", suffix=".log", delete=False) as file:
        file.write("".join(traceback.format_exception(bug)))
        for package in ("mlx-experts", "mlx", "mlx-lm"):
            file.write(f"{package} {version(package)}\n")
    print(f"error: a bug of ours: {type(bug).__name__}: {bug}", file=sys.stderr)
    print(f"  next:     please report it with the file {Path(file.name)}", file=sys.stderr)
    return 3
