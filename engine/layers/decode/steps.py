"""The steps of a token through the decoder, and their merging into compiled functions.

A pure step is a function of arrays; a call may keep state (a cache). Neighbouring pure steps become one
function, which ``mx.compile`` replays without Python. Steps hand each other values by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_, itemgetter
from typing import Any

import mlx.core as mx

from mlx_experts.engine.dispatch.trace import Tally
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.forward_context import ForwardState

Values = dict[str, Any]
Run = Callable[..., tuple[mx.array, ...]]
# The rule of a piece whose kernels gave something else than plain MLX.
TRIED = "self_check"


@dataclass(frozen=True, eq=False)
class Pure:
    """A function of arrays: a piece of a layer.

    Args:
        name: which piece, for the trace.
        reads: names of its inputs.
        writes: names of its outputs.
        watched: the modules whose arrays it uses.
        plain: ``(modules, *inputs)`` to the outputs, in plain MLX.
        prepare: makes the form of this package's kernels for the arrays that the modules hold, or says why
            there is none. The form is called as ``plain`` is.
        fused: what ``prepare`` gave.
        tallies: count each call.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    watched: Watched
    plain: Run
    prepare: Callable[[], Run | Decline]
    fused: Run | Decline
    tallies: tuple[Tally, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        reads: Sequence[str],
        writes: Sequence[str],
        watched: Watched,
        plain: Run,
        prepare: Callable[[], Run | Decline],
        tallies: tuple[Tally, ...] = (),
    ) -> Pure:
        """A piece, prepared."""
        return cls(name, tuple(reads), tuple(writes), watched, plain, prepare, prepare(), tallies)

    def run(self, inputs: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """The outputs by the form that is used."""
        form = self.plain if isinstance(self.fused, Decline) else self.fused
        return form(self.watched.modules, *inputs)

    def again(self) -> Pure:
        """The piece for the arrays that are there now; what a trial declined stays declined."""
        tried = isinstance(self.fused, Decline) and self.fused.rule == TRIED
        return replace(self, watched=self.watched.again(), fused=self.fused if tried else self.prepare())


@dataclass(frozen=True, eq=False)
class Call:
    """Something that keeps state, in Python.

    Args:
        reads: names of the values that it looks up.
        writes: names of the values that it sets.
        run: ``(values, state, caches)``.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[Values, ForwardState, Sequence[Any]], None]


Step = Pure | Call


@dataclass(eq=False)
class Unit:
    """Neighbouring pure steps as one function.

    Args:
        steps: in their order.
        outputs: names of the values that later steps read.
        compiled: whether MLX compiles the function.
    """

    steps: Sequence[Pure]
    outputs: tuple[str, ...]
    compiled: bool
    inputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        inputs: dict[str, None] = {}
        made: set[str] = set()
        for step in self.steps:
            inputs |= dict.fromkeys(name for name in step.reads if name not in made)
            made |= set(step.writes)
        self.inputs = tuple(inputs)
        self._take_hold()
        self._tallies = [tally for step in self.steps for tally in step.tallies]
        (name, *more) = self.inputs
        # Of one name the getter gives no tuple.
        self._take: Callable[[Values], tuple[mx.array, ...]] = (
            itemgetter(*self.inputs) if more else lambda values: (values[name],)
        )

    def _take_hold(self) -> None:
        """Note the arrays that the steps were prepared for."""
        self._holders = [h for step in self.steps for h in step.watched.holders]
        self._names = [n for step in self.steps for n in step.watched.names]
        self._held = [a for step in self.steps for a in step.watched.held]
        self._run = mx.compile(self._body) if self.compiled else self._body

    def _body(self, *inputs: mx.array) -> list[mx.array]:
        values = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            made = step.run([values[name] for name in step.reads])
            values.update(zip(step.writes, made, strict=True))
        return [values[name] for name in self.outputs]

    def __call__(self, values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
        """Replace the outputs in ``values``."""
        # `Watched.stands`, written out over all steps: it is asked at every token.
        if not all(map(is_, map(dict.get, self._holders, self._names), self._held)):
            self.steps = [step.again() for step in self.steps]
            self._take_hold()
        values.update(zip(self.outputs, self._run(*self._take(values)), strict=True))
        for tally in self._tallies:
            tally.add()


def merged(steps: Iterable[Step], last: tuple[str, ...], compiled: bool) -> list[Callable[..., None]]:
    """The steps as functions ``(values, state, caches)``, neighbouring pure ones as one.

    Args:
        last: names that are read after the last step.
    """
    found: list[Callable[..., None]] = []
    pure: list[Pure] = []
    rest = list(steps)

    def close(at: int) -> None:
        if pure:
            found.append(Unit(tuple(pure), _live(pure, rest[at:], last), compiled))
            pure.clear()

    for at, step in enumerate(rest):
        if isinstance(step, Pure):
            pure.append(step)
        else:
            close(at)
            found.append(step.run)
    close(len(rest))
    return found


def _live(made: Sequence[Pure], later: Sequence[Step], last: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the values that were made are read before they are made anew."""
    written = dict.fromkeys(name for step in made for name in step.writes)
    live: dict[str, None] = {}
    gone: set[str] = set()
    for step in later:
        live |= dict.fromkeys(name for name in step.reads if name in written and name not in gone)
        gone |= set(step.writes)
    live |= dict.fromkeys(name for name in last if name in written and name not in gone)
    return tuple(live)
