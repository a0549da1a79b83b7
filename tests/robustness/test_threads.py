"""Two threads that generate at once give the tokens that each gives alone, and every call is counted."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

PROMPTS = ([5, 17, 3, 42, 8], [64, 2, 9])
STEPS = 12


def packed(name: str, seed: int) -> Any:
    """A tiny model with its experts in 4 bits, everything computed."""
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family), seed)
    nn.quantize(model, 32, 4, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
    model.eval()
    mx.eval(model.parameters())
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=STEPS)]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "longcat_flash"])
@pytest.mark.parametrize("models", [1, 2])
def test_threads_give_the_tokens_of_one_and_no_call_is_lost(name: str, models: int, lab: Any) -> None:
    held = [packed(name, seed) for seed in range(models)]
    pairs = [(held[i % models], prompt) for i, prompt in enumerate(PROMPTS)]
    trace.reset()
    alone = [greedy(model, prompt) for model, prompt in pairs]
    counted = trace.total("fused")
    assert counted > 0
    trace.reset()
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    start = threading.Barrier(2)

    def work(number: int) -> None:
        start.wait()
        for _ in range(3):
            found[number].append(greedy(*pairs[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    together = trace.total("fused")
    trace.reset()
    assert found == {number: [tokens] * 3 for number, tokens in enumerate(alone)}
    assert together == 3 * counted
