"""Progress bars on long work; silent where nobody watches."""

from __future__ import annotations

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


def track(items: Iterable[T], description: str, total: int, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar that counts them."""
    with _bar(quiet) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            bar.update(task, description=f"{description} {item}"[:48])
            yield item
            bar.advance(task)
