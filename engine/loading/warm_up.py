"""Runs a loaded model once at the sizes that are served first, so that no request waits for a compiler."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.models.base import LanguageModel

# Tokens of a prompt, and rows that are decoded together.
PROMPT, ROWS = 32, (1, 2, 4, 8)


def warm_up(model: nn.Module, tell: Callable[[str], None]) -> None:
    """Read a short prompt and decode one token, for one sequence and for several at once.

    Args:
        model: a loaded model.
        tell: called with the progress.
    """
    began = time.perf_counter()
    for rows in ROWS:
        tell(f"warming up: {rows} sequence{'s' if rows > 1 else ''} of {ROWS[-1]}")
        cache = make_prompt_cache(model)
        for length in (PROMPT, 1):
            mx.eval(model(mx.zeros((rows, length), dtype=mx.int32), cache=cache))
    if isinstance(model, LanguageModel):
        # Nobody asked for these calls.
        trace.reset()
    tell(f"ready: warmed up in {time.perf_counter() - began:.1f} s")
