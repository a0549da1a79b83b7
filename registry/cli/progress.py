"""Progress bars on long work; silent where nobody watches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def _bar(quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


@contextmanager
def shard_progress(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar over the shards of a checkpoint; yields what loading calls with (done, all, file)."""
    with _bar(quiet) as bar:
        task = bar.add_task("loading", total=None)

        def update(done: int, total: int, file: str) -> None:
            bar.update(task, completed=done, total=total, description=file)

        yield update


def tell_of_compiling(quiet: bool = False) -> None:
    """Say on standard error that the CPU's kernels are compiled: a machine's first token waits for it."""
    logger = logging.getLogger("mlx_experts.kernels")
    if quiet or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def track(items: Iterable[T], description: str, total: int, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar that counts them."""
    with _bar(quiet) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            bar.update(task, description=f"{description} {item}"[:48])
            yield item
            bar.advance(task)
