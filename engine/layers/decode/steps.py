"""The steps of a token through the decoder, and their merging into compiled functions.

A pure step is a function of arrays; a call may keep state (a cache). Neighbouring pure steps become one
function, which ``mx.compile`` replays without Python. Steps hand each other values by name. What a launch
left in one array is handed on as that array, unless a call reads it, which wants an array of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_, itemgetter
from typing import Any

import mlx.core as mx

from mlx_experts.engine.dispatch.trace import Tallies, Tally
from mlx_experts.engine.kernels.gpu.pieces.packed import PackedValue, Place, Value, viewed
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.forward_context import ForwardState

Values = dict[str, Any]
Plain = Callable[..., tuple[mx.array, ...]]
Run = Callable[..., tuple[Value, ...]]
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
            there is none. It is called as ``plain`` is, and takes and gives values where launches left them.
        fused: what ``prepare`` gave.
        tallies: count each call.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    watched: Watched
    plain: Plain
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
        plain: Plain,
        prepare: Callable[[], Run | Decline],
        tallies: tuple[Tally, ...] = (),
    ) -> Pure:
        """A piece, prepared."""
        return cls(name, tuple(reads), tuple(writes), watched, plain, prepare, prepare(), tallies)

    def run(self, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """The outputs by the form that is used."""
        if isinstance(self.fused, Decline):
            return self.plain(self.watched.modules, *map(viewed, inputs))
        return self.fused(self.watched.modules, *inputs)

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
        tallies: count each call.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[Values, ForwardState, Sequence[Any]], None]
    tallies: tuple[Tally, ...] = ()


Step = Pure | Call


@dataclass(eq=False)
class Unit:
    """Neighbouring pure steps as one function.

    Args:
        steps: in their order.
        outputs: names of the values that later steps read.
        arrays: those of them that must be arrays of their own.
        makers: which function before makes an input, by name.
        compiled: whether MLX compiles the function.
    """

    steps: Sequence[Pure]
    outputs: tuple[str, ...]
    arrays: frozenset[str]
    makers: Mapping[str, Unit]
    compiled: bool
    inputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        inputs: dict[str, None] = {}
        made: set[str] = set()
        for step in self.steps:
            inputs |= dict.fromkeys(name for name in step.reads if name not in made)
            made |= set(step.writes)
        self.inputs = tuple(inputs)
        # Outputs that are handed on in a launch's array: what that is called among the values, and the place.
        self.left: dict[str, tuple[str, Place]] = {}
        self._gives: tuple[str, ...] = ()
        self._run = mx.compile(self._body) if self.compiled else self._body
        self._take: Callable[[Values], tuple[mx.array, ...]] | None = None

    def _reads(self) -> Callable[[Values], tuple[mx.array, ...]]:
        """What gets the arrays of the inputs; the functions before have run once."""
        keys: dict[str, None] = {}
        found: list[tuple[str, Place | None]] = []
        for name in self.inputs:
            maker = self.makers.get(name)
            key, place = maker.left.get(name, (name, None)) if maker is not None else (name, None)
            keys[key] = None
            found.append((key, place))
        at = {key: number for number, key in enumerate(keys)}
        self._places = [(at[key], place) for key, place in found]
        (key, *more) = keys
        # Of one name the getter gives no tuple.
        return itemgetter(*keys) if more else lambda values: (values[key],)

    def _body(self, *arrays: mx.array) -> list[mx.array]:
        values: dict[str, Value] = {}
        for name, (at, place) in zip(self.inputs, self._places, strict=True):
            values[name] = arrays[at] if place is None else PackedValue(arrays[at], place)
        for step in self.steps:
            made = step.run([values[name] for name in step.reads])
            values.update(zip(step.writes, made, strict=True))
        given: dict[str, mx.array] = {}
        names: dict[int, str] = {}
        self.left = {}
        for name in self.outputs:
            value = values[name]
            if isinstance(value, PackedValue) and name not in self.arrays:
                # No other function's: values of that name may be made anew before this one is read.
                key = names.setdefault(id(value.array), f"{id(self)}.{len(names)}")
                self.left[name] = key, value.place
                given[key] = value.array
            else:
                given[name] = viewed(value)
        self._gives = tuple(given)
        return list(given.values())

    def __call__(self, values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
        """Put the outputs into ``values``."""
        take = self._take
        if take is None:
            take = self._take = self._reads()
        made = self._run(*take(values))
        values.update(zip(self._gives, made, strict=True))


class Merged:
    """The steps of a token with neighbouring pure ones as one function each.

    Args:
        steps: in their order.
        last: names that are read after the last step.
        compiled: whether MLX compiles the functions.
    """

    def __init__(self, steps: Iterable[Step], last: tuple[str, ...], compiled: bool) -> None:
        self._steps, self._last, self._compiled = list(steps), last, compiled
        self._merge()

    def _merge(self) -> None:
        pure = [step for step in self._steps if isinstance(step, Pure)]
        self._holders = [h for step in pure for h in step.watched.holders]
        self._names = [n for step in pure for n in step.watched.names]
        self._held = [a for step in pure for a in step.watched.held]
        self._tallies = Tallies(tally for step in self._steps for tally in step.tallies)
        self.runs = _functions(self._steps, self._last, self._compiled)

    def __call__(self, values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
        """Run every step over ``values``."""
        # `Watched.stands`, written out over all steps: it is asked at every token.
        if not all(map(is_, map(dict.get, self._holders, self._names), self._held)):
            # Whoever reads a changed launch's array must be traced anew too.
            self._steps = [step.again() if isinstance(step, Pure) else step for step in self._steps]
            self._merge()
        for run in self.runs:
            run(values, state, caches)
        self._tallies.add()


def _functions(steps: Sequence[Step], last: tuple[str, ...], compiled: bool) -> list[Callable[..., None]]:
    """The steps as functions ``(values, state, caches)``, neighbouring pure ones as one."""
    found: list[Callable[..., None]] = []
    pure: list[Pure] = []
    makers: dict[str, Unit] = {}

    def close(at: int) -> None:
        if pure:
            names, arrays = _live(pure, steps[at:], last)
            unit = Unit(tuple(pure), names, arrays, dict(makers), compiled)
            found.append(unit)
            makers.update((name, unit) for step in pure for name in step.writes)
            pure.clear()

    for at, step in enumerate(steps):
        if isinstance(step, Pure):
            pure.append(step)
        else:
            close(at)
            found.append(step.run)
            for name in step.writes:
                makers.pop(name, None)
    close(len(steps))
    return found


def _live(
    made: Sequence[Pure], later: Sequence[Step], last: tuple[str, ...]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Which of the values that were made are read before they are made anew, and by what keeps state."""
    written = dict.fromkeys(name for step in made for name in step.writes)
    live: dict[str, None] = {}
    calls: set[str] = set()
    gone: set[str] = set()
    for step in later:
        reads = dict.fromkeys(name for name in step.reads if name in written and name not in gone)
        live |= reads
        if isinstance(step, Call):
            calls |= set(reads)
        gone |= set(step.writes)
    reads = dict.fromkeys(name for name in last if name in written and name not in gone)
    return tuple(live | reads), frozenset(calls | set(reads))
