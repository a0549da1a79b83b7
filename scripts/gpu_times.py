#!/usr/bin/env python3
"""Times the fused experts on this NVIDIA GPU against the gathered products, for one shape.

    python scripts/gpu_times.py block   --hidden 2048 --width 768 --experts 128 --top-k 8
    ncu --clock-control none --cache-control none --metrics gpu__time_duration.sum \\
        python scripts/gpu_times.py kernels --hidden 2048 --width 768 --experts 128 --top-k 8

``block`` prints microseconds a layer, host included, of norm, router, experts and residual in a chain; with
``--shared WIDTH`` (and ``--weighed``: by a sigmoid) a shared expert too, added apart and by the kernel.
``kernels`` runs fused, warp-per-row and gathered experts for the profiler, each time on other experts,
so that no weights are left in the cache. Weights are random, 4-bit, in groups of 64, under bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_experts.engine.kernels import activations, expert_weights, gather
from mlx_experts.engine.kernels import router_kernel as router
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.router_kernel import RouterSteps

CHAIN, ROUNDS, LAYERS = 48, 25, 4


def container(hidden: int, width: int, experts: int) -> SwitchGLU:
    """Quantised experts with random weights."""
    made = SwitchGLU(hidden, width, experts)
    made.set_dtype(mx.bfloat16)
    nn.quantize(made, group_size=64, bits=4)
    mx.eval(made.parameters())
    return made


def shared_expert(args: argparse.Namespace) -> tuple[dict[str, nn.Module], nn.Module | None]:
    """A quantised shared expert with random weights, and the layer that weighs it."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        made = nn.Linear(inputs, outputs, bias=False)
        made.set_dtype(mx.bfloat16)
        return made

    shapes = {"gate": (args.hidden, args.shared), "up": (args.hidden, args.shared)}
    shapes["down"] = (args.shared, args.hidden)
    parts = {n: nn.QuantizedLinear.from_linear(layer(*s), 64, 4) for n, s in shapes.items()}
    return parts, layer(args.hidden, 1) if args.weighed else None


def kernels(args: argparse.Namespace) -> None:
    """Every form on every set of experts, for the profiler."""
    made, swiglu = container(args.hidden, args.width, args.experts), activations.make("swiglu")
    experts = expert_weights.read(made, swiglu)
    assert experts is not None
    if args.shared:
        parts, weigh = shared_expert(args)
        experts = dataclasses.replace(experts, shared=expert_weights.read_shared(parts, swiglu, weigh))
    order = mx.random.permutation(args.experts).astype(mx.uint32)
    # Slices of longer arrays, as a router leaves them: arrays of 8 bytes live where they are slow to read.
    sets = [order[None, i : i + args.top_k] for i in range(0, args.experts - args.top_k + 1, args.top_k)]
    weights = mx.full((1, 8 + args.top_k), 1.0 / args.top_k)[:, : args.top_k]
    x = mx.random.normal((1, args.hidden)).astype(mx.bfloat16)
    mx.eval(sets, weights, x)
    forms: dict[str, Callable[..., mx.array]] = {
        "fused": cuda.prepare(experts, mx.bfloat16),
        "a warp a row": cuda.prepare(experts, mx.bfloat16, tensor_cores=False),
        "gathered": lambda *token: gather.experts(made, swiglu, *token),
    }
    for name, run in forms.items():
        for i in range(args.repeat):
            mx.eval(run(x, sets[i % len(sets)], weights))
        print(f"{name}: {args.repeat} calls")


def block(args: argparse.Namespace) -> None:
    """Microseconds a layer of a chain of whole blocks; the forms take turns, medians of the rounds."""
    swiglu, steps = activations.make("swiglu"), RouterSteps(args.experts, args.top_k, normalise="sum")
    route = router.prepare(steps, "cuda")
    layers = []
    for _ in range(LAYERS):
        norm, gate = nn.RMSNorm(args.hidden), nn.Linear(args.hidden, args.experts, bias=False)
        made = container(args.hidden, args.width, args.experts)
        norm.set_dtype(mx.bfloat16), gate.set_dtype(mx.bfloat16)
        experts = expert_weights.read(made, swiglu)
        parts, weigh = shared_expert(args) if args.shared else ({}, None)
        with_shared = None
        if args.shared:
            both = dataclasses.replace(experts, shared=expert_weights.read_shared(parts, swiglu, weigh))
            with_shared = cuda.prepare(both, mx.bfloat16)
        layers.append((norm, gate, made, cuda.prepare(experts, mx.bfloat16), parts, weigh, with_shared))

    def apart(i: int, h: mx.array) -> mx.array | float:
        _, _, _, _, parts, weigh, _ = layers[i]
        if not parts:
            return 0
        y = parts["down"](activations.apply(swiglu, parts["gate"](h), parts["up"](h)))
        return y if weigh is None else mx.sigmoid(weigh(h)) * y

    def plain_route(logits: mx.array) -> tuple[mx.array, mx.array]:
        scores = mx.softmax(logits, axis=-1, precise=True)
        chosen = mx.argpartition(scores, kth=-args.top_k, axis=-1)[..., -args.top_k :]
        share = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, share / share.sum(axis=-1, keepdims=True)

    def usual(i: int, x: mx.array) -> mx.array:
        norm, gate, made, *_ = layers[i]
        h = norm(x)
        chosen, share = plain_route(gate(h))
        y = (made(h, chosen) * share[..., None]).sum(axis=-2)
        return x + (y + apart(i, h) if args.shared else y)

    def fused(i: int, x: mx.array, routed: Callable = route) -> mx.array:
        norm, gate, _, run, *_ = layers[i]
        h = norm(x)
        y = run(h, *routed(gate(h)))
        return x + (y + apart(i, h) if args.shared else y)

    def folded(i: int, x: mx.array) -> mx.array:
        norm, gate, *_, run = layers[i]
        h = norm(x)
        return x + run(h, *route(gate(h)))

    compiled = [mx.compile(lambda x, i=i: fused(i, x)) for i in range(LAYERS)]
    compiled_folded = [mx.compile(lambda x, i=i: folded(i, x)) for i in range(LAYERS)]
    forms: dict[str, Callable[[int, mx.array], mx.array]] = {
        "mlx-lm's containers": usual,
        "fused experts": lambda i, x: fused(i, x, plain_route),
        "fused experts and router": fused,
        "the same, compiled": lambda i, x: compiled[i](x),
    }
    if args.shared:
        forms["shared expert in the kernel"] = folded
        forms["that, compiled"] = lambda i, x: compiled_folded[i](x)
    start = mx.random.normal((1, 1, args.hidden)).astype(mx.bfloat16)

    def once(run: Callable[[int, mx.array], mx.array]) -> float:
        x, begin = start, time.perf_counter()
        for n in range(CHAIN):
            x = run(n % LAYERS, x)
        mx.eval(x)
        return (time.perf_counter() - begin) / CHAIN * 1e6

    for run in forms.values():
        for _ in range(5):
            once(run)
    taken = {name: [] for name in forms}
    for _ in range(ROUNDS):
        for name, run in forms.items():
            taken[name].append(once(run))
    base = statistics.median(taken["mlx-lm's containers"])
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:27s} {median:7.1f} us a layer   {base / median:5.2f}x   fastest {min(times):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kernels", "block"])
    for name in ("hidden", "width", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--shared", type=int, default=0, help="width of a shared expert")
    parser.add_argument("--weighed", action="store_true", help="weigh it by the sigmoid of a row of its own")
    parser.add_argument("--repeat", type=int, default=12, help="calls of each form under 'kernels'")
    args = parser.parse_args()
    print(mx.device_info().get("device_name"), "MLX", mx.__version__)
    {"kernels": kernels, "block": block}[args.what](args)


if __name__ == "__main__":
    main()
