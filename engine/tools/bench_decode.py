"""Decodes with the fused path on and off and says how fast each was and whether the text agreed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.layers.moe import MoE


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding of one prompt on both paths.

    Args:
        gather_tokens_per_second, fused_tokens_per_second: medians over the rounds, without the prompt.
        layers: MoE layers in the model.
        fused_per_token: fused calls a decoded token when fused is on, and when it is off.
        agree: tokens from the start that are equal on both paths.
        tokens: tokens decoded.
        gap: where the paths first differ, how much more likely the fused path's token was than the other's
            in its own logits (natural log); None when all agree. Close to 0 is a near-tie.
    """

    gather_tokens_per_second: float
    fused_tokens_per_second: float
    layers: int
    fused_per_token: tuple[float, float]
    tokens: int
    agree: int
    gap: float | None

    @property
    def ratio(self) -> float:
        """How many times faster decoding is with fused on."""
        return self.fused_tokens_per_second / self.gather_tokens_per_second


def _greedy(model: nn.Module, prompt: mx.array, tokens: int) -> tuple[list[int], list[mx.array], float]:
    """Token ids, their logits, and seconds a token; each token is one call with one row."""
    cache = make_prompt_cache(model)
    if prompt.size > 1:
        model(prompt[None, :-1], cache=cache)
        mx.eval([c.state for c in cache])
    token, ids, logits = prompt[-1:], [], []
    start = time.perf_counter()
    for _ in range(tokens):
        scores = model(token[None], cache=cache)[0, -1]
        token = mx.argmax(scores, keepdims=True)
        mx.async_eval(token)
        ids.append(token)
        logits.append(scores)
    mx.eval(ids)
    return [cast(int, i.item()) for i in ids], logits, (time.perf_counter() - start) / tokens


def compare_decoding(model: nn.Module, prompt: mx.array, *, tokens: int = 64, rounds: int = 5) -> Decoding:
    """Decode ``tokens`` greedily after ``prompt`` ``[L]`` on both paths, in turn.

    The model's own setting of the fused path is restored afterwards; the trace is reset.
    """
    blocks = [module for module in model.modules() if isinstance(module, MoE)]
    before = [block.fused for block in blocks]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    texts, calls = {}, {}
    try:
        for round_ in range(rounds + 1):  # the first one warms up
            for fused in (False, True):
                for block in blocks:
                    block.use_fused(fused)
                trace.reset()
                ids, logits, each = _greedy(model, prompt, tokens)
                texts[fused] = ids, logits
                calls[fused] = trace.total("fused", rows="1") / tokens
                if round_:
                    seconds[fused].append(each)
    finally:
        for block, fused_before in zip(blocks, before, strict=True):
            block.use_fused(fused_before)
    (fused_ids, fused_logits), (gather_ids, _) = texts[True], texts[False]
    pairs = list(zip(fused_ids, gather_ids, strict=True))
    agree = next((i for i, (f, g) in enumerate(pairs) if f != g), len(pairs))
    gap = None
    if agree < len(pairs):
        f, g = pairs[agree]
        gap = cast(float, (fused_logits[agree][f] - fused_logits[agree][g]).item())
    return Decoding(
        gather_tokens_per_second=1 / median(seconds[False]),
        fused_tokens_per_second=1 / median(seconds[True]),
        layers=len(blocks),
        fused_per_token=(calls[True], calls[False]),
        tokens=len(pairs),
        agree=agree,
        gap=gap,
    )
