"""Speculative decoding (Leviathan et al. 2023): a drafter guesses tokens, one pass of the model checks them.

The loop is mlx-lm's (``mlx_lm.generate.speculative_generate_step``): a drafted token stands where the model
would have sampled it, so that greedy text is that of plain decoding. Here anything may draft, and drafting
ends by itself where it takes longer than it saves.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    generate_step,
    generation_stream,
    maybe_quantize_kv_cache,
)
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import greedy_sampler

from mlx_experts.engine.models.model import last_position
from mlx_experts.registry.errors import SettingError

# Rounds before drafting is judged by what it made, and before it is by what it could have made at best.
ROUNDS, FIRST_ROUNDS = 5, 2
# Plain steps in a row that drafting is judged by, and tokens after which they are measured anew, the first
# time and later: what is easy to guess changes with the text, and a machine is busy for a moment.
STEPS, SOON, AGAIN = 4, 16, 64

Token = tuple[int, mx.array, bool]


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    def begin(self, prompt: mx.array, hidden: mx.array | None) -> None:
        """Read the prompt [L] but for its last token, and the model's hidden states [L - 1, D] of it."""

    def draft(self, count: int) -> mx.array:
        """Guess at most ``count`` tokens after the last one that is known."""

    def confirm(self, tokens: Sequence[int], drafted: int, hidden: mx.array | None) -> None:
        """Take over what the model said.

        Args:
            tokens: the new tokens: drafted ones that stand, and one of the model's own.
            drafted: how many had been drafted.
            hidden: the model's hidden states [len(tokens), D] at the tokens before each of these.
        """

    def settle(self, dropped: int) -> None:
        """Hold every token that was given: the last ``dropped`` of those confirmed last were not."""


@dataclass
class Account:
    """What drafting has done.

    Args:
        drafted: tokens that were guessed.
        accepted: guesses that the model agreed with.
        stopped: why drafting ended before the text did; empty where it did not.
        steps: seconds of a plain step, each time that some were measured.
        rounds: seconds, guesses and tokens of each round with drafts since then.
    """

    drafted: int = 0
    accepted: int = 0
    stopped: str = ""
    rounds: list[tuple[float, int, int]] = field(default_factory=list, repr=False)
    steps: list[float] = field(default_factory=list, repr=False)

    @property
    def rate(self) -> float:
        """Share of the guesses that the model agreed with."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def loses(self) -> bool:
        """Whether a token takes longer with drafts than without, as far as it was measured.

        Until there are enough rounds to know how many guesses stand, drafting loses only where it would if
        all of them stood.
        """
        count = len(self.rounds)
        if count < FIRST_ROUNDS or not self.steps:
            return False
        # The shortest of each: the first ones compile, and a machine that is busy only makes them longer.
        seconds, without = min(each for each, _, _ in self.rounds), min(self.steps[-2:])
        guesses, made = (sum(each[i] for each in self.rounds) for i in (1, 2))
        with_drafts = seconds * count / (made if count >= ROUNDS else guesses + count)
        if with_drafts <= without:
            return False
        self.stopped = (
            f"drafting ended: {1e3 * with_drafts:.1f} ms a token with it, {1e3 * without:.1f} ms without"
        )
        return True


class DraftModel:
    """A smaller model of the same vocabulary as a drafter.

    Args:
        model: any model of mlx-lm's interface.
        cache: its prompt cache; a fresh one when None.
        prefill_step_size: tokens of a prompt that are read at once.
        quantize: called with the cache after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: list[Any] | None = None,
        prefill_step_size: int = 512,
        quantize: Callable[[list[Any]], None] = lambda cache: None,
    ) -> None:
        self.model, self.step, self.quantize = model, prefill_step_size, quantize
        self.cache = make_prompt_cache(model) if cache is None else cache
        self._pending: list[int] = []
        _require_trimmable(self.cache, "the draft model")

    def begin(self, prompt: mx.array, hidden: mx.array | None) -> None:
        """Read the prompt but for its last token."""
        prefill(self.model, self.cache, prompt, self.step, self.quantize)
        self._pending = [_first(prompt[-1:])]

    def draft(self, count: int) -> mx.array:
        """Guess the likeliest ``count`` tokens."""
        drafts: list[mx.array] = []
        tokens = mx.array(self._pending, mx.uint32)
        for _ in range(count):
            logits = self.model(tokens[None], cache=self.cache)[:, -1]
            self.quantize(self.cache)
            tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
            mx.async_eval(tokens)
            drafts.append(tokens)
        return mx.concatenate(drafts)

    def confirm(self, tokens: Sequence[int], drafted: int, hidden: mx.array | None) -> None:
        """Forget the guesses that did not stand."""
        if not drafted:
            self._pending += tokens
            return
        stand = len(tokens) - 1
        # The last guess has not been read.
        trim_prompt_cache(self.cache, max(drafted - 1 - stand, 0))
        self._pending = list(tokens[-2:] if stand == drafted else tokens[-1:])

    def settle(self, dropped: int) -> None:
        """Read what is known and not read, or go back over what was not given."""
        unread = self._pending[: max(len(self._pending) - dropped, 0)]
        if unread:
            self.model(mx.array(unread, mx.uint32)[None], cache=self.cache)
            self.quantize(self.cache)
        trim_prompt_cache(self.cache, max(dropped - len(self._pending), 0))
        mx.eval([each.state for each in self.cache])


def prefill(
    model: nn.Module,
    cache: list[Any],
    prompt: mx.array,
    step: int,
    quantize: Callable[[list[Any]], None],
    call: Callable[[mx.array], Any] | None = None,
) -> list[Any]:
    """Read a prompt [L] but for its last token, ``step`` tokens at a time; what each call gave besides."""
    found, rest, reading = [], prompt, last_position(model)
    while rest.size > 1:
        count = min(step, rest.size - 1)
        given = reading(rest[:count][None], cache=cache) if call is None else call(rest[:count])
        quantize(cache)
        mx.eval([each.state for each in cache])
        if call is not None:
            mx.eval(given)
            found.append(given)
        rest = rest[count:]
        mx.clear_cache()
    return found


def _require_trimmable(cache: list[Any], whose: str) -> None:
    if not can_trim_prompt_cache(cache):
        kinds = sorted({type(each).__name__ for each in cache if not each.is_trimmable()})
        raise SettingError(
            f"speculative decoding goes back in the prompt cache, and that of {whose} cannot",
            expected="caches of keys and values",
            found=", ".join(kinds),
            hint="generate without a draft",
        )


def speculate(
    prompt: mx.array,
    model: nn.Module,
    drafter: Drafter,
    *,
    num_draft_tokens: int = 2,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    cache: list[Any] | None = None,
    prefill_step_size: int = 512,
    quantize: Callable[[list[Any]], None] = lambda cache: None,
    hidden: bool = False,
    adaptive: bool = True,
    account: Account | None = None,
    stream: Any = generation_stream,
) -> Generator[Token, None, None]:
    """Generate token by token with a drafter.

    Args:
        prompt: token ids [L].
        model: the model whose text it is.
        drafter: guesses; see :class:`Drafter`.
        num_draft_tokens: guesses a round.
        max_tokens: at most this many; below 0 without end.
        sampler: log-probabilities to tokens; the likeliest when None.
        logits_processors: functions of the tokens so far and the logits.
        cache: the model's prompt cache, updated in place.
        hidden: give the drafter the model's hidden states.
        adaptive: end drafting where it takes longer than it saves.
        account: filled with what drafting did.

    Yields:
        A token, its log-probabilities [V], and whether it was drafted.

    Raises:
        SettingError: a cache of the drafter cannot go back, or the number of guesses is below 0.
    """
    if num_draft_tokens < 0:
        raise SettingError(
            "a round has no such number of guesses",
            where="num_draft_tokens",
            expected="0 or more",
            found=str(num_draft_tokens),
        )
    account = account if account is not None else Account()
    keeps, cache = cache is not None, make_prompt_cache(model) if cache is None else cache
    choose = _Choice(sampler or greedy_sampler, list(logits_processors or ()))

    def read(tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        if hidden:
            states, logits = model.hidden_and_logits(tokens[None], cache)
            return logits[0], states[0]
        return model(tokens[None], cache=cache)[0], None

    with mx.stream(stream):
        call = (lambda part: read(part)[1]) if hidden else None
        seen = prefill(model, cache, prompt, prefill_step_size, quantize, call)
        choose.history = prompt[:-1]
        drafter.begin(prompt, mx.concatenate(seen) if seen else None)

    def reread(tokens: mx.array) -> None:
        read(tokens)
        quantize(cache)

    place = Place(cache, reread)
    last, made, measure_at = _first(prompt[-1:]), 0, 0
    new: list[int] = []
    given = 0

    def plainly(count: int) -> tuple[list[int], list[mx.array], mx.array | None, float]:
        """Steps without drafts, each begun before the one before it has ended, as plain decoding does.

        Returns:
            Their tokens and log-probabilities, the hidden states [count, D], and the seconds of a step.
        """
        place.mark()
        fed, found, states, ends = [mx.array([last], mx.uint32)], [], [], []
        for i in range(count + 1):
            if i < count:
                logits, state = read(fed[-1])
                quantize(cache)
                tokens, logprobs = choose(fed[-1], logits)
                mx.async_eval(tokens, logprobs)
                choose.keep(fed[-1])
                fed.append(tokens.astype(mx.uint32))
                found.append(logprobs[0])
                states += [] if state is None else [state]
            if i:
                mx.eval(fed[i])
                ends.append(time.perf_counter())
        place.hold(mx.concatenate(fed[:-1]))
        step = (ends[-1] - ends[0]) / (count - 1)
        return _ids(mx.concatenate(fed[1:])), found, mx.concatenate(states) if states else None, step

    try:
        while made != max_tokens:
            left = max_tokens - made if max_tokens > 0 else num_draft_tokens + 1 + STEPS
            if adaptive and num_draft_tokens and made >= measure_at and left > STEPS:
                with mx.stream(stream):
                    new, chances, states, step = plainly(STEPS)
                    drafter.confirm(new, 0, states)
                account.steps.append(step)
                account.rounds = []
                measure_at = made + STEPS + (AGAIN if made else SOON)
                given, last = 0, new[-1]
                for token, chance in zip(new, chances, strict=True):
                    made, given = made + 1, given + 1
                    yield token, chance, False
                continue
            count = min(num_draft_tokens, left - 1)
            began = time.perf_counter()
            with mx.stream(stream):
                drafts = drafter.draft(count) if count else mx.array([], mx.uint32)
                # A drafter may have no guess yet.
                count = drafts.size
                place.mark()
                fed = mx.concatenate([mx.array([last], mx.uint32), drafts.astype(mx.uint32)])
                logits, states = read(fed)
                quantize(cache)
                tokens, logprobs = choose(fed, logits)
                mx.eval(tokens, logprobs, drafts)
                guesses, sampled = _ids(drafts), _ids(tokens)
                stand = next((i for i, guess in enumerate(guesses) if guess != sampled[i]), count)
                new, given = sampled[: stand + 1], 0
                place.hold(fed)
                place.keep(stand + 1)
                drafter.confirm(new, count, None if states is None else states[: stand + 1])
            account.drafted += count
            account.accepted += stand
            choose.keep(fed[: stand + 1])
            spent, last = time.perf_counter() - began, new[-1]
            for i, token in enumerate(new):
                made, given = made + 1, given + 1
                yield token, logprobs[i], i < stand
            if count:
                account.rounds.append((spent, count, len(new)))
                if adaptive and account.loses():
                    break
    finally:
        if keeps and new and not account.stopped:
            # Whoever keeps the cache takes it to hold every token that was given.
            with mx.stream(stream):
                if given == len(new):
                    read(mx.array(new[-1:], mx.uint32))
                    quantize(cache)
                else:
                    place.keep(given + 1)
                drafter.settle(len(new) - given)
                mx.eval([each.state for each in cache])
    if account.stopped and made != max_tokens:
        history = choose.history
        plain = generate_step(
            mx.array([last], mx.uint32),
            model,
            stream,
            max_tokens=max_tokens - made if max_tokens > 0 else max_tokens,
            sampler=choose.sampler,
            logits_processors=[_after(history, each) for each in choose.processors] or None,
            prompt_cache=cache,
        )
        for token, logprob in plain:
            yield token, logprob, False


def _ids(tokens: mx.array) -> list[int]:
    found: Any = tokens.tolist()
    return [int(each) for each in found]


def _first(tokens: mx.array) -> int:
    return _ids(tokens)[0]


class Place:
    """Where a model's caches stand, and the way back from tokens that do not stand after all.

    Keys and values are cut off again. A state, or a window that has lost its oldest tokens, is put back to
    what it was at the last mark, and the tokens that stand are read once more.

    Args:
        cache: the caches.
        read: reads tokens [L] into them.
    """

    def __init__(self, cache: list[Any], read: Callable[[mx.array], Any]) -> None:
        self._cache, self._read = cache, read
        self._twins: list[Any] = []
        self._fed, self._held = mx.array([]), 0

    def mark(self) -> None:
        """Remember this place."""
        self._twins = [None if _cuts(each) else _twin(each) for each in self._cache]

    def hold(self, fed: mx.array) -> None:
        """``fed`` [L] was read since the mark."""
        self._fed, self._held = fed, fed.size

    def keep(self, count: int) -> None:
        """Hold the first ``count`` of the tokens that were read since the mark."""
        surplus = self._held - count
        if not surplus:
            return
        if all(twin is None for twin in self._twins):
            trim_prompt_cache(self._cache, surplus)
        else:
            for each, twin in zip(self._cache, self._twins, strict=True):
                if twin is None:
                    each.trim(self._held)
                else:
                    vars(each).update(vars(_twin(twin)))
            self._read(self._fed[:count])
        self._held = count


def _cuts(cache: Any) -> bool:
    """Whether a cache can always let its newest tokens go."""
    if isinstance(cache, CacheList):
        return all(_cuts(each) for each in cache.caches)
    return isinstance(cache, KVCache | QuantizedKVCache)


def _twin(value: Any) -> Any:
    """A copy of a cache, or of what one holds, that later writes into the cache do not reach."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list | tuple):
        return type(value)(_twin(each) for each in value)
    if value is None or isinstance(value, int | float | str):
        return value
    copied = copy.copy(value)
    vars(copied).update({name: _twin(each) for name, each in vars(value).items()})
    return copied


class _Choice:
    """Samples one token after each that was fed, with the processors of logits that see all before it."""

    def __init__(self, sampler: Any, processors: list[Any]) -> None:
        self.sampler, self.processors = sampler, processors
        self.history: mx.array | None = None

    def __call__(self, fed: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Tokens [L] and log-probabilities [L, V] after each of ``fed`` [L], by ``logits`` [L, V]."""
        if self.processors:
            rows = []
            for i in range(fed.size):
                before = (
                    fed[: i + 1] if self.history is None else mx.concatenate([self.history, fed[: i + 1]])
                )
                row = logits[i : i + 1]
                for processor in self.processors:
                    row = processor(before, row)
                rows.append(row)
            logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return self.sampler(logprobs), logprobs

    def keep(self, fed: mx.array) -> None:
        """Take tokens that stand into what the processors see."""
        if self.processors and self.history is not None:
            self.history = mx.concatenate([self.history, fed])


def _after(history: mx.array | None, processor: Any) -> Any:
    """A processor of logits that sees the tokens of ``history`` before its own."""
    if history is None:
        return processor
    return lambda tokens, logits: processor(mx.concatenate([history, tokens]), logits)


def speculative_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: nn.Module,
    stream: Any = generation_stream,
    *,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 512,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    **options: Any,
) -> Generator[Token, None, None]:
    """As ``mlx_lm.generate.speculative_generate_step``; further options are :func:`speculate`'s.

    Args:
        prompt_cache: the model's caches, and behind them the draft model's.
    """
    quantize = functools.partial(
        maybe_quantize_kv_cache,
        quantized_kv_start=quantized_kv_start,
        kv_group_size=kv_group_size,
        kv_bits=kv_bits,
    )
    own = theirs = None
    if prompt_cache is not None:
        # A model may keep fewer caches than it has layers.
        count = len(make_prompt_cache(model))
        own, theirs = _Part(prompt_cache, 0, count), _Part(prompt_cache, count, len(prompt_cache))
    drafter = DraftModel(draft_model, theirs, prefill_step_size, quantize)
    return speculate(
        prompt.astype(mx.uint32),
        model,
        drafter,
        cache=own,
        prefill_step_size=prefill_step_size,
        quantize=quantize,
        stream=stream,
        **options,
    )


class _Part(list[Any]):
    """A run of a list of caches; a cache that is replaced here is replaced there."""

    def __init__(self, whole: list[Any], start: int, end: int) -> None:
        super().__init__(whole[start:end])
        self._whole, self._start = whole, start

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._whole[self._start + key] = value
