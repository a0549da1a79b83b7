"""Runs a command of mlx-lm with this package's loader in every place where it asks for a model."""

from __future__ import annotations

import _thread
import ast
import difflib
import importlib
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.loading.checkpoint_loader import STORED
from mlx_experts.engine.loading.doors import Doors, open_doors
from mlx_experts.engine.loading.warm_up import warm_up
from mlx_experts.engine.tools.layer_calls import call_layers_alone
from mlx_experts.registry.checkpoint.hub import resolve_path
from mlx_experts.registry.errors import RegistryError, SettingError

# Where mlx-lm keeps its commands, and the one that only calls the others.
_FOLDERS = ("", "quant")
_CALLER = "cli"
# It loads in a thread of its own, whose end nobody would notice.
_SERVER = "server"
_MODELS = ("--model", "--draft-model")
# They change tensors and write them, in the dtype that they are stored in.
_RUN_NO_MODEL = frozenset({"convert", "fuse"})
# They run a model layer by layer.
_CALL_LAYERS = frozenset({"awq"})
_THEIRS, _OURS = Path(mlx_lm.__path__[0]), Path(__file__).parent.parent
_GIVEN = (ValueError, RuntimeError, OSError, ImportError)
# What argparse leaves with where the command line is wrong.
_MISTAKE = 2


@dataclass(frozen=True)
class Tool:
    """A command of mlx-lm.

    Args:
        name: the word by which ``mlx_lm`` knows it.
        module: its module.
    """

    name: str
    module: str


def tools() -> dict[str, Tool]:
    """Every command of the installed mlx-lm by its name: the modules that have a ``main``."""
    root = Path(mlx_lm.__path__[0])
    found = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            if path.stem != _CALLER and not path.stem.startswith("_") and _has_main(path):
                module = ".".join(filter(None, ("mlx_lm", folder, path.stem)))
                found[path.stem] = Tool(path.stem, module)
    return dict(sorted(found.items()))


def _has_main(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)


def run_tool(
    name: str,
    arguments: Sequence[str],
    *,
    tell: Callable[[str], None],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Run a command of mlx-lm on this package's engine, in this process.

    Args:
        name: the command, such as ``server`` or ``lora``.
        arguments: its own arguments.
        tell: called with what a person should know, on the first rank alone.
        options: options of :func:`~mlx_experts.load_model` for every model that it loads.

    Raises:
        SettingError: mlx-lm has no such command, or it stopped with an error of its own.
        RegistryError: whatever is wrong with a checkpoint.
        SystemExit: the command has read its arguments and left.
    """
    tool = _known(name)
    settings = dict(options or {})
    say = tell if mx.distributed.init().rank() == 0 else lambda text: None
    doors = Doors(tell=say, options=settings)
    trace.reset()
    with open_doors(doors), _argv(tool, arguments):
        module = _imported(tool)
        if tool.name in _RUN_NO_MODEL:
            settings.setdefault("dtype", STORED)
        if tool.name in _CALL_LAYERS:
            doors.ready = call_layers_alone
        if tool.name == _SERVER:
            doors.ready = lambda model: warm_up(model, say)
            _look_at_models(doors, arguments)
            if mx.distributed.init().rank() == 0:
                _look_at_address(arguments)
        say(f"mlx_lm.{tool.name} {version('mlx-lm')} runs on the engine of mlx-experts")
        try:
            if tool.name == _SERVER:
                _serve(module)
            else:
                module.main()
        except SystemExit as leave:
            # What argparse leaves with means here that a check has failed.
            if leave.code == _MISTAKE:
                raise SystemExit(1) from leave
            raise
        except RegistryError:
            raise
        except Exception as error:  # another package's command; a bug of ours is raised again
            if _is_ours(error):
                raise
            raise _stopped(tool, error) from error
        finally:
            fused, gathered = trace.total("fused"), trace.total("gather")
            if fused or gathered:
                say(f"experts of mlx-experts: {fused} calls fused, {gathered} gathered")


def _serve(module: Any) -> None:
    """Run the server, which ends where the model that it starts with cannot be loaded.

    Alone it would go on without its thread of generation, whose end only its log tells.
    """
    provider = module.ModelProvider
    load, failed = provider.load_default, []

    def load_or_end(self: Any) -> None:
        try:
            load(self)
        except Exception as error:  # raised again where the command ends
            failed.append(error)
            _thread.interrupt_main()
            # A thread ends with it and says nothing.
            raise SystemExit from error

    provider.load_default = load_or_end
    try:
        module.main()
    except KeyboardInterrupt:
        # Before the server listens nobody else takes it.
        if not failed:
            raise
    finally:
        provider.load_default = load
    if failed:
        raise failed[0]


def _known(name: str) -> Tool:
    found = tools()
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
        raise SettingError(
            f"mlx-lm {version('mlx-lm')} has no command '{name}'",
            expected=", ".join(found),
            hint=f"did you mean {near[0]}?" if near else "",
        )
    return found[name]


def _imported(tool: Tool) -> Any:
    try:
        return importlib.import_module(tool.module)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"mlx_lm.{tool.name} needs a package that is not installed",
            where=tool.module,
            expected=str(error.name),
            hint=f"pip install {str(error.name).partition('.')[0].replace('_', '-')}",
        ) from error


@contextmanager
def _argv(tool: Tool, arguments: Sequence[str]) -> Iterator[None]:
    """The command line as the command's own parser reads it."""
    before = sys.argv
    sys.argv = [f"mlx-experts run {tool.name}", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _stated(arguments: Sequence[str], key: str) -> list[str]:
    """The values of an option."""
    pairs = zip(arguments, [*arguments[1:], None], strict=True)
    apart = [value for each, value in pairs if each == key and value is not None]
    return apart + [each.partition("=")[2] for each in arguments if each.startswith(f"{key}=")]


def _look_at_models(doors: Doors, arguments: Sequence[str]) -> None:
    """Refuse, before anything starts, models that could not be loaded.

    Raises:
        RegistryError: what is wrong with one.
    """
    for key in _MODELS:
        for model in _stated(arguments, key):
            doors.is_dense(resolve_path(model), quiet=True)


def _look_at_address(arguments: Sequence[str]) -> None:
    """Refuse an address where nobody can listen, before a thread loads the model and goes on without it.

    Raises:
        SettingError: the system's reason.
    """
    host = (_stated(arguments, "--host") or ["127.0.0.1"])[-1]
    port = (_stated(arguments, "--port") or ["8080"])[-1]
    try:
        number = int(port)
    except ValueError:
        # The command's own parser says so.
        return
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as place:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind((address, number))
    except (OSError, OverflowError) as error:
        raise SettingError(
            "the server cannot listen at this address",
            where=f"{host}:{port}",
            found=str(error),
            hint="choose another --host or --port",
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it, which is a bug, and not the command.

    MLX says with the kinds of ``_GIVEN`` that it was given something wrong, which may be the command's own.
    """
    if isinstance(error, _GIVEN):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    parts = [f for f in frames if _within(f, _THEIRS) or _within(f, _OURS)]
    return bool(parts) and _within(parts[-1], _OURS) and not _within(parts[-1], Path(__file__))


def _within(frame: traceback.FrameSummary, folder: Path) -> bool:
    return Path(frame.filename).is_relative_to(folder)


def _stopped(tool: Tool, error: BaseException) -> SettingError:
    """What a command raised, with the line of its own that did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _within(frame, _THEIRS)] or frames
    return SettingError(
        f"mlx_lm.{tool.name} stopped",
        where=f"{own[-1].filename}:{own[-1].lineno}",
        found=f"{type(error).__name__}: {error}"[:500],
    )
