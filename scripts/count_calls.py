#!/usr/bin/env python3
"""Counts what Python does for one token in one decoder layer: ours beside mlx-lm's, on the demo checkpoint.

    python scripts/count_calls.py [--json] [--where]

Python calls are frames entered, C calls are calls of built-in functions, branches are conditional jumps and
steps of loops, as the interpreter executes them between a layer's call and its return; built-in functions
that built-in functions call are not seen. The trace of expert calls is part of what is counted. The first
line has MLX's own linear layers and what is ours around them; the second has the CPU's kernels for them too,
each of which crosses from MLX to the kernel and back. ``--where`` lists our layer's by function. The figures
are means over the layers.
"""

from __future__ import annotations

import argparse
import dis
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_experts import load
from mlx_experts.engine.layers.linear import Embedding, Linear, QuantizedEmbedding, QuantizedLinear

DEMO = Path(__file__).resolve().parent.parent / "api" / "demo"
PROMPT = [1, 2, 3]


@dataclass
class Counts:
    """What was executed."""

    python_calls: float = 0
    c_calls: float = 0
    branches: float = 0
    where: Counter[str] = field(default_factory=Counter)
    branches_where: Counter[str] = field(default_factory=Counter)


def _branches() -> frozenset[int]:
    """The interpreter's conditional jumps, whatever this release calls them."""
    return frozenset(
        number
        for name, number in dis.opmap.items()
        if name == "FOR_ITER" or ("JUMP" in name and "_IF_" in name)
    )


def _name(code: Any) -> str:
    return f"{Path(code.co_filename).name}:{code.co_qualname}"


def counted(run: Any, counts: Counts) -> Any:
    """Execute ``run`` once for its calls and once more for its branches.

    Returns:
        What the second execution returned.
    """

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts.python_calls += 1
            counts.where[_name(frame.f_code)] += 1
        elif event == "c_call":
            counts.c_calls += 1

    def trace(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in jumps:
            counts.branches += 1
            counts.branches_where[_name(frame.f_code)] += 1
        return trace

    jumps = _branches()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        counts.c_calls -= 1  # the call that ended the counting
    counts.python_calls -= 1  # `run` itself
    counts.where.pop(_name(run.__code__), None)
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(None)


class Counting:
    """Stands in a decoder layer's place, and counts what the layer does while ``on``."""

    def __init__(self, layer: Any, counts: Counts) -> None:
        self.layer, self.counts, self.on = layer, counts, False

    def __call__(self, *arguments: Any) -> Any:
        """The layer's result."""
        if not self.on:
            return self.layer(*arguments)
        *before, cache = arguments
        # The layer runs twice, so the cache's position is put back in between.
        offset = cache.offset

        def run() -> Any:
            cache.offset = offset
            return self.layer(*before, cache)

        return counted(run, self.counts)


def with_mlx_linear_layers(model: Any) -> Any:
    """The model with MLX's own linear layers, not the CPU's kernels."""
    for module in model.modules():
        if isinstance(module, Linear | QuantizedLinear | Embedding | QuantizedEmbedding):
            module.__class__ = module.computes
    return model


def count(model: Any) -> Counts:
    """One token's counts in one layer of a model."""
    counts, cache = Counts(), make_prompt_cache(model)
    layers = model.model.layers
    counting = [Counting(layer, counts) for layer in layers]
    layers[:] = counting
    mx.eval(model(mx.array([PROMPT]), cache=cache))
    for on in (False, False, True):
        for each in counting:
            each.on = on
        mx.eval(model(mx.array([PROMPT[:1]]), cache=cache))
    layers[:] = [each.layer for each in counting]
    number = len(layers)
    for each in (counts.where, counts.branches_where):
        each.update({name: n / number - n for name, n in each.items()})
    counts.python_calls, counts.c_calls, counts.branches = (
        n / number for n in (counts.python_calls, counts.c_calls, counts.branches)
    )
    return counts


def main() -> None:
    """Print the counts of both side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--where", action="store_true")
    asked = parser.parse_args()
    found = {
        "mlx-experts": count(with_mlx_linear_layers(load(DEMO)[0])),
        "with CPU kernels": count(load(DEMO)[0]),
        "mlx-lm": count(load_model(DEMO)[0]),
    }
    if asked.json:
        print(json.dumps({name: asdict(counts) for name, counts in found.items()}))
        return
    print(f"{'a layer and token':20}{'Python calls':>14}{'C calls':>10}{'branches':>10}")
    for name, counts in found.items():
        print(f"{name:20}{counts.python_calls:14.1f}{counts.c_calls:10.1f}{counts.branches:10.1f}")
    if asked.where:
        ours = found["mlx-experts"]
        print("\nmlx-experts by function: Python calls, branches")
        for where, times in ours.where.most_common():
            print(f"{times:6.2f}{ours.branches_where[where]:6.2f}  {where}")


if __name__ == "__main__":
    main()
