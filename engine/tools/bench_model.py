"""Times whole models of random weights: mlx-lm's own class against ours, in turn, on the same arrays.

A decoded token is split into Python (the graph is built), encoding (MLX turns it into launches) and waiting
for the device. The three follow one another when each token is waited for; decoding overlaps them as MLX can.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.trace import trace

CONTEXT = 32
_WARM = 8
_SPLIT_TOKENS = 12
_COUNTED_TOKENS = 8


@dataclass(frozen=True)
class Split:
    """Where a token's time goes when each is waited for, in milliseconds (medians)."""

    python_ms: float
    encode_ms: float
    wait_ms: float


@dataclass(frozen=True)
class Kernels:
    """What the GPU ran for a token: launches, and the milliseconds in which any of them ran."""

    count: float
    busy_ms: float
    longest: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One model's figures.

    Args:
        tokens_per_second: median over the rounds.
        spread: half the interquartile range of the rounds, relative to the median.
        kernels: None where nothing counts them: on the CPU, and without torch's profiler.
        prefill: tokens of a prompt a second, median over the rounds; None where none was asked for.
    """

    tokens_per_second: float
    spread: float
    split: Split
    kernels: Kernels | None
    prefill: float | None


@dataclass(frozen=True)
class Comparison:
    """mlx-lm's model against ours.

    Args:
        agree: greedy tokens from the start that are equal.
        logit_distance: of ours to mlx-lm's at the first decoded token, relative to the latter's length.
        truth_distances: of mlx-lm's and of ours to mlx-lm's in float32; None where that was not asked for.
        traced: calls a token by path, rows and reason, in our model.
    """

    theirs: Side
    ours: Side
    tokens: int
    agree: int
    logit_distance: float
    truth_distances: tuple[float, float] | None
    traced: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times the tokens a second of mlx-lm."""
        return self.ours.tokens_per_second / self.theirs.tokens_per_second

    @property
    def prefill_ratio(self) -> float | None:
        """The same for prompts."""
        if self.ours.prefill is None or self.theirs.prefill is None:
            return None
        return self.ours.prefill / self.theirs.prefill


def compare(
    theirs: nn.Module,
    ours: nn.Module,
    vocab: int,
    *,
    tokens: int = 64,
    rounds: int = 5,
    prefill: int = 0,
    truth: bool = False,
) -> Comparison:
    """Decode ``tokens`` greedily with both models in turn, ``rounds`` times.

    Args:
        prefill: rows of the prompt that is timed too; 0 for none.
        truth: also compare the logits of both with those of mlx-lm's model in float32, which stays so.
    """
    mx.random.seed(1)
    prompt = mx.random.randint(0, vocab, (CONTEXT,))
    models = {"theirs": theirs, "ours": ours}
    texts = {name: _decode(model, prompt, tokens)[0] for name, model in models.items()}
    trace.reset()
    rates: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            rates[name].append(_decode(model, prompt, tokens)[1])
    calls = rounds * (tokens + _WARM)
    traced = {f"{row.path} {row.rows} {row.reason}".strip(): row.count / calls for row in trace.table()}
    prompts = _prefill(models, vocab, prefill, rounds) if prefill else {}
    sides = {
        name: Side(
            statistics.median(rates[name]),
            _spread(rates[name]),
            _split(model, prompt),
            _kernels(model, prompt),
            statistics.median(prompts[name]) if prefill else None,
        )
        for name, model in models.items()
    }
    pairs = list(zip(texts["theirs"], texts["ours"], strict=True))
    agree = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    logits = {name: _logits(model, prompt) for name, model in models.items()}
    apart = _distance(logits["ours"], logits["theirs"])
    distances = None
    if truth:
        theirs.set_dtype(mx.float32)
        true = _logits(theirs, prompt)
        distances = _distance(logits["theirs"], true), _distance(logits["ours"], true)
    return Comparison(sides["theirs"], sides["ours"], len(pairs), agree, apart, distances, traced)


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def _decode(model: nn.Module, prompt: mx.array, tokens: int) -> tuple[list[int], float]:
    """Greedy tokens by mlx-lm's own loop, and tokens a second after the first few."""
    made, start = [], 0.0
    for i, (token, _) in enumerate(generate_step(prompt, model, max_tokens=tokens + _WARM)):
        made.append(int(token))
        if i == _WARM - 1:
            start = time.perf_counter()
    return made, tokens / (time.perf_counter() - start)


def _prefill(models: Mapping[str, nn.Module], vocab: int, rows: int, rounds: int) -> dict[str, list[float]]:
    """Tokens of a prompt a second, in turn."""
    prompt = mx.random.randint(0, vocab, (1, rows))
    rates: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):  # the first one warms up
        for name, model in models.items():
            cache = make_prompt_cache(model)
            mx.synchronize()
            start = time.perf_counter()
            mx.eval(model(prompt, cache=cache)[:, -1], [c.state for c in cache])
            if number:
                rates[name].append(rows / (time.perf_counter() - start))
    return rates


class _Run:
    """Greedy decoding a token at a time."""

    def __init__(self, model: nn.Module, prompt: mx.array) -> None:
        self.model, self.cache = model, make_prompt_cache(model)
        mx.eval(model(prompt[None], cache=self.cache))
        self.token = prompt[-1:]
        for _ in range(_WARM):
            mx.eval(self.step())

    def step(self) -> mx.array:
        """The next token, not yet computed."""
        self.token = mx.argmax(self.model(self.token[None], cache=self.cache)[:, -1, :], axis=-1)
        return self.token


def _split(model: nn.Module, prompt: mx.array) -> Split:
    run = _Run(model, prompt)
    parts: list[tuple[float, float, float]] = []
    for _ in range(_SPLIT_TOKENS):
        begin = time.perf_counter()
        token = run.step()
        built = time.perf_counter()
        mx.async_eval(token)
        encoded = time.perf_counter()
        mx.eval(token)
        parts.append((built - begin, encoded - built, time.perf_counter() - encoded))
    return Split(*(statistics.median(p) * 1e3 for p in zip(*parts, strict=True)))


def _kernels(model: nn.Module, prompt: mx.array) -> Kernels | None:
    """Launches of a token as CUPTI reports them through torch's profiler; None where that is not at hand."""
    if current_device() != "cuda" or find_spec("torch") is None:
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return None
    torch.zeros(1).cuda()
    run = _Run(model, prompt)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_COUNTED_TOKENS):
            mx.eval(run.step())
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    longest: dict[str, float] = {}
    for e in events:
        longest[e.name] = longest.get(e.name, 0.0) + e.time_range.elapsed_us() / _COUNTED_TOKENS
    first = dict(sorted(longest.items(), key=lambda pair: -pair[1])[:12])
    return Kernels(len(events) / _COUNTED_TOKENS, busy / _COUNTED_TOKENS / 1e3, first)


def _logits(model: nn.Module, prompt: mx.array) -> mx.array:
    """Of one decoded token, in float32."""
    cache = make_prompt_cache(model)
    mx.eval(model(prompt[None, :-1], cache=cache))
    logits = model(prompt[None, -1:], cache=cache).astype(mx.float32)
    mx.eval(logits)
    return cast(mx.array, logits)


def _distance(logits: mx.array, reference: mx.array) -> float:
    """Relative to the length of the reference."""
    return cast(float, (mx.linalg.norm(logits - reference) / mx.linalg.norm(reference)).item())
