"""How numba compiles this folder's computations, keeps them on disk, and runs their loops."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import cfunc, njit, prange, types
from numba.core.caching import FunctionCache

from mlx_experts.engine.kernels.cpu import start
from mlx_experts.engine.kernels.cpu.intrinsics import call_part


def kept_on_disk(function: Callable[..., Any], **options: Any) -> Any:
    """numba's compilation of a function, kept on disk where a folder for it can be written."""
    function = _named(function)
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder, neither beside this file nor in the home folder
        return njit(**options)(function)


@lru_cache(maxsize=1)
def _edition() -> str:
    """What tells this folder's code from an earlier one: numba looks at the one file of a function only."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:8]


def _named(function: Any) -> Any:
    """The function under a name of its own for each edition: numba files compiled code under the name."""
    name = f"{function.__name__.removeprefix('_')}_{_edition()}"
    made = FunctionType(function.__code__.replace(co_name=name, co_qualname=name), function.__globals__, name)
    made.__module__, made.__qualname__ = function.__module__, name
    return made


def on_disk(function: Callable[..., Any]) -> bool:
    """Whether numba has kept code of a function, named for this edition."""
    try:
        folder = Path(FunctionCache(function).cache_path)
    except RuntimeError:  # as in ``kept_on_disk``
        return False
    module = function.__module__.rpartition(".")[2]
    return any(folder.glob(f"{module}.{function.__qualname__}-*.nbc"))


class Part:
    """A function of integers without a result that compiled code calls by its address.

    Args:
        function: what is compiled, when it is first asked for.
        count: its arguments.
        options: numba's.
    """

    def __init__(self, function: Callable[..., Any], count: int = 2, **options: Any) -> None:
        self.function = _named(function)
        self._signature = types.void(*[types.int64] * count)
        self._options = {"error_model": "numpy", **options}

    @cached_property
    def address(self) -> int:
        """Where its code lies, as long as the process lasts."""
        start.wait_for(self.function)
        try:
            made = cfunc(self._signature, cache=True, **self._options)(self.function)
        except RuntimeError:  # as in ``kept_on_disk``
            made = cfunc(self._signature, **self._options)(self.function)
        _HELD.append(made)
        return int(made.address)


# Two threads may ask for one part at once, and both keep its address.
_HELD: list[Any] = []


def _one_by_one(part, count, context):  # type: ignore[no-untyped-def]
    for index in range(count):
        call_part(part, index, context)


def _on_threads(part, count, context):  # type: ignore[no-untyped-def]
    for index in prange(count):
        call_part(part, index, context)


ONE_BY_ONE, ON_THREADS = Part(_one_by_one, 3), Part(_on_threads, 3, parallel=True)
"""Both call ``part(index, context)`` for each index below ``count``."""


@lru_cache(maxsize=1)
def one_by_one() -> Any:
    """``ONE_BY_ONE`` for callers in Python, who give addresses: of a part, how often, and of a context."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(ONE_BY_ONE.address)


class Forms:
    """One computation, whose loops run one by one or on all threads.

    Each loop's body is a part: a function of its index and of the address of a context. So numba compiles
    everything once, and what a loop runs on is one small function for all computations.

    Args:
        function: what is called; its first arguments are the address of a loop and those of the parts.
        parts: the bodies of its loops.
        options: numba's, for the parts that are functions.
    """

    def __init__(
        self, function: Callable[..., Any], *parts: Callable[..., Any] | Part, **options: Any
    ) -> None:
        self.function = kept_on_disk(function, nogil=True, error_model="numpy")
        self.parts = tuple(part if isinstance(part, Part) else Part(part, **options) for part in parts)

    def compiled(self, arguments: tuple[Any, ...]) -> None:
        """Compile everything for arguments of these numba types, and keep it on disk."""
        addresses = [ON_THREADS.address, ONE_BY_ONE.address, *(part.address for part in self.parts)]
        self.function.compile((*[types.int64] * (len(addresses) - 1), *arguments))

    @cached_property
    def parallel(self) -> Callable[..., Any]:
        """The computation on all threads."""
        return self._by(ON_THREADS)

    @cached_property
    def serial(self) -> Callable[..., Any]:
        """The computation on the caller's thread."""
        return self._by(ONE_BY_ONE)

    def _by(self, loop: Part) -> Callable[..., Any]:
        addresses = [part.address for part in (loop, *self.parts)]
        start.wait_for(self.function.py_func)
        return partial(self.function, *addresses)
