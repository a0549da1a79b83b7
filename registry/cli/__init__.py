"""The commands `registry` and `mlx-experts`: one verb a file, and one policy for errors.

Exit codes: 0 done, 1 something you gave is wrong, 2 a check did not pass, 3 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from mlx_experts.registry.cli import (
    bench,
    check,
    diff,
    draft,
    generate,
    inspect,
    list_,
    parity,
    run_,
    schema,
    show,
    tune,
)
from mlx_experts.registry.cli.common import versions
from mlx_experts.registry.cli.entry import INTERRUPTED
from mlx_experts.registry.errors import RegistryError

app = typer.Typer(
    name="registry",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, module in (
    ("list", list_.list_families),
    ("show", show.show),
    ("check", check.check),
    ("inspect", inspect.inspect),
    ("parity", parity.parity),
    ("draft", draft.draft),
    ("diff", diff.diff),
    ("tune", tune.tune),
    ("bench", bench.bench),
    ("generate", generate.generate),
    ("schema", schema.schema),
    ("fmt", schema.fmt),
):
    app.command(name)(module)
app.command("run", context_settings=run_.CONTEXT)(run_.run)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
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
