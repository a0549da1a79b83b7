"""Times the fused path against the gather path on random experts of a given shape.

Everything compared is timed in one run, one call of each in turn, so that a slow spell of the machine falls
on all of them. Legend: E experts, K experts per token, H model width, F expert width.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from statistics import median, quantiles
from typing import Literal, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_experts.engine.dispatch import eligibility
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.dispatch.policy import Bounds, Policy
from mlx_experts.engine.dispatch.tuning_cache import Timing
from mlx_experts.engine.kernels import (
    activations,
    expert_weights,
    fused_kernel,
    gather,
    many_rows_kernel,
    naive,
)
from mlx_experts.engine.kernels.cpu import experts as cpu
from mlx_experts.engine.kernels.cpu import start
from mlx_experts.engine.kernels.request import Activation, Decline, Format, storage_name
from mlx_experts.engine.layers.mlp import MLP
from mlx_experts.registry.catalog.public_shapes import Shape
from mlx_experts.registry.errors import SettingError

# Experts are made until they fill this many bytes: more than any cache, so that weights come from memory.
EXPERT_BYTES = 1 << 30
# One sample is as many calls as fill this time, as decoding makes one call after another.
SAMPLE_SECONDS = 0.02
_TOKENS = 16
_CHECKED = 4

Baseline = Literal["gather", "mlx-lm"]
FastPath = Literal["fused", "many"]
Path = Callable[[mx.array, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Storage:
    """How the experts' weights are stored; ``bits`` 0 means plain, in the activations' dtype."""

    mode: Format = "affine"
    bits: int = 4
    group_size: int = 64

    def name(self, dtype: mx.Dtype = mx.bfloat16) -> str:
        """As ``Projection.storage`` says it."""
        return storage_name(self.mode, self.bits or dtype.size * 8, self.group_size)


@dataclass(frozen=True)
class Layer:
    """Experts and tokens to time; ``shared`` is an expert that every token reads, or None."""

    container: nn.Module
    activation: Activation
    tokens: list[tuple[mx.array, mx.array, mx.array]]
    bytes_per_token: int
    shared: MLP | None = None

    def experts(self) -> expert_weights.ExpertWeights:
        """The stacks, the shared expert's included."""
        experts = expert_weights.read(self.container, self.activation)
        assert experts is not None
        if self.shared is None:
            return experts
        shared = expert_weights.read_shared(self.shared.projections(), self.activation, None)
        return replace(experts, shared=shared)


@dataclass(frozen=True)
class Result:
    """Both paths at one shape.

    Args:
        noise: half the interquartile range of the rounds' ratios, relative to their median.
        bytes_per_token: bytes of weights that one token needs.
        baseline_error, fused_error: relative RMS to the float32 truth.
    """

    baseline_us: float
    fused_us: float
    noise: float
    bytes_per_token: int
    baseline_error: float
    fused_error: float

    @property
    def ratio(self) -> float:
        """How many times faster fused is."""
        return self.baseline_us / self.fused_us

    @property
    def gigabytes_per_second(self) -> float:
        """Weights read by the fused path in a second, in 10**9 bytes."""
        return self.bytes_per_token / self.fused_us / 1000

    def timing(self, width: int, storage: str, rows: int = 1, path: FastPath = "fused") -> Timing:
        """The part that tuning keeps."""
        return Timing(width, self.baseline_us, self.fused_us, self.noise, storage, rows, path)


def _random_projection(
    experts: int, rows: int, cols: int, storage: Storage, dtype: mx.Dtype, bias: bool
) -> nn.Module:
    """Random codes with scales that keep activations near one; nothing is quantised, which would be slow."""
    if not storage.bits:
        plain = SwitchLinear(1, 1, 1, bias=False)
        plain.weight = (mx.random.normal((experts, rows, cols)) * cols**-0.5).astype(dtype)
        module: nn.Module = plain
    else:
        quantised = QuantizedSwitchLinear(
            8 * storage.group_size, 8, 1, False, storage.group_size, storage.bits, storage.mode
        )
        groups = (experts, rows, cols // storage.group_size)
        packed = (experts, rows, cols * storage.bits // 32)
        words = mx.random.randint(-(1 << 31), (1 << 31) - 1, packed, mx.int32).view(mx.uint32)
        if storage.mode == "affine":
            top = (1 << storage.bits) - 1
            quantised.scales = (mx.random.uniform(0.5, 1.5, groups) * (3.5 / top * cols**-0.5)).astype(dtype)
            quantised.biases = (quantised.scales * (-top / 2)).astype(dtype)
        elif storage.mode == "nvfp4":
            quantised.scales = mx.random.randint(0x10, 0x18, groups).astype(mx.uint8)
        else:
            quantised.scales = mx.random.randint(119, 122, groups).astype(mx.uint8)
        # A byte of 0x7F is no number in mxfp8; clearing one exponent bit avoids it.
        quantised.weight = words & 0xBFBFBFBF if storage.mode == "mxfp8" else words
        module = quantised
    if bias:
        module.bias = (mx.random.normal((experts, rows)) * 0.1).astype(dtype)
    mx.eval(module.parameters())
    return module


def random_layer(
    hidden: int,
    width: int,
    experts: int,
    top_k: int,
    activation: Activation,
    *,
    storage: Storage = Storage(),
    dtype: mx.Dtype = mx.bfloat16,
    bias: bool = False,
    shared: int = 0,
    seed: int = 0,
    rows: int = 1,
) -> Layer:
    """Random experts of a shape and tokens whose experts differ from call to call.

    Fewer than ``experts`` are made when they would not fit in ``EXPERT_BYTES``.

    Args:
        shared: width of a shared expert, stored as the others are; 0 for none.
        rows: tokens a call.

    Raises:
        SettingError: a width is not a multiple of the group size.
    """
    for name, value in (("hidden", hidden), ("width", width), ("shared", shared)):
        if storage.bits and value % storage.group_size:
            raise SettingError(
                "This shape cannot be stored in this group size.",
                where=name,
                expected=f"a multiple of {storage.group_size}",
                found=str(value),
            )
    mx.random.seed(seed)
    per_weight = (storage.bits or dtype.size * 8) / 8 * 1.15
    stacks = 3 if activation.gated else 2
    fitting = int(EXPERT_BYTES / (stacks * hidden * width * per_weight))
    count = min(experts, max(fitting, 2 * top_k))
    names = ("gate_proj", "up_proj", "down_proj") if activation.gated else ("fc1", "fc2")
    container = (SwitchGLU if activation.gated else SwitchMLP)(1, 1, 1)
    for name in names:
        shape = (hidden, width) if name in ("down_proj", "fc2") else (width, hidden)
        container[name] = _random_projection(count, *shape, storage, dtype, bias)
    container.eval()
    expert = _shared_expert(hidden, shared, activation, storage, dtype, bias) if shared else None
    tokens = []
    for _ in range(_TOKENS):
        x = mx.random.normal((1, rows, hidden)).astype(dtype)
        picks = mx.argsort(mx.random.uniform(shape=(1, rows, count)), axis=-1)[..., :top_k]
        indices = mx.contiguous(picks.astype(mx.uint32))
        weights = mx.softmax(mx.random.normal((1, rows, top_k)), axis=-1)
        mx.eval(x, indices, weights)
        tokens.append((x, indices, weights))
    total = sum(a.nbytes for name in names for a in container[name].parameters().values())
    total = total // count * top_k
    if expert is not None:
        total += sum(a.nbytes for m in expert.projections().values() for a in m.parameters().values())
    return Layer(container, activation, tokens, total, expert)


def _shared_expert(
    hidden: int, width: int, activation: Activation, storage: Storage, dtype: mx.Dtype, bias: bool
) -> MLP:
    expert = MLP(hidden, width, activation, bias=bias)
    expert.set_dtype(dtype)
    if storage.bits:
        nn.quantize(expert, group_size=storage.group_size, bits=storage.bits, mode=storage.mode)
    expert.eval()
    mx.eval(expert.parameters())
    return expert


def _fused(layer: Layer, dtype: mx.Dtype) -> Path:
    """The kernel, whatever the settings say; a Decline becomes an error that names the rule."""
    device = current_device()
    experts = layer.experts()
    x, indices, _ = layer.tokens[0]
    request = expert_weights.request_of(
        experts, layer.activation, rows=x.shape[1], top_k=indices.shape[-1], dtype=dtype, device=device
    )
    verdict = eligibility.check(request, Policy())
    if not isinstance(verdict, Decline) and request.shared is not None:
        verdict = eligibility.check_shared(request, request.shared, Policy())
    if not isinstance(verdict, Decline):
        kernel = fused_kernel(device)
        prepared = kernel.unavailable() or kernel.prepare(experts, x.dtype)
        if not isinstance(prepared, Decline):
            return cast(Path, prepared)  # nothing is transformed here, so no call is declined
        verdict = prepared
    raise _declined("No fused kernel takes this call.", verdict)


def many(layer: Layer, dtype: mx.Dtype) -> Path | Decline:
    """The path for many rows of this device, whatever the settings say."""
    experts = layer.experts()
    x, indices, _ = layer.tokens[0]
    request = expert_weights.request_of(
        experts,
        layer.activation,
        rows=x.shape[1],
        top_k=indices.shape[-1],
        dtype=dtype,
        device=current_device(),
    )
    verdict = eligibility.check_many(request, Policy(otherwise=Bounds(many_from=2)))
    if isinstance(verdict, Decline):
        return verdict
    kernel = many_rows_kernel(request.device)
    return kernel.declines(request) or cast(Path, kernel.prepare(experts, request))


def _declined(what: str, why: Decline) -> SettingError:
    return SettingError(what, where=why.rule, expected=why.wanted, found=why.got, hint=why.hint)


def _baseline(layer: Layer, baseline: Baseline) -> Path:
    def gathered(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        return gather.experts(layer.container, layer.activation, x, indices, weights)

    def of_mlx_lm(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        return (layer.container(x, indices) * weights[..., None].astype(x.dtype)).sum(axis=-2)

    routed = gathered if baseline == "gather" else of_mlx_lm
    shared = layer.shared
    return routed if shared is None else lambda x, *route: routed(x, *route) + shared(x)


def relative_rms(value: mx.array, truth: mx.array) -> float:
    """``|value - truth| / |truth|`` in root mean squares."""
    wide = truth.astype(mx.float32)
    error = mx.square(value.astype(mx.float32) - wide).mean()
    return cast(float, mx.sqrt(error / mx.square(wide).mean()).item())


def interleaved(
    calls: Mapping[str, Callable[[int], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call, one of each in turn in every round; the call gets the round's number."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-warm_up, rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(number)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return times


class _Batch:
    """Calls of one path that are timed as one sample; the first one finds out how many fill it."""

    def __init__(self, path: Path, tokens: list[tuple[mx.array, mx.array, mx.array]]) -> None:
        self._path, self._tokens = path, tokens
        mx.eval(path(*tokens[0]))
        start = time.perf_counter()
        mx.eval(path(*tokens[1]))
        self.calls = max(1, min(200, round(SAMPLE_SECONDS / (time.perf_counter() - start))))

    def __call__(self, number: int) -> None:
        """Run the calls, each on another token, and wait for all of them."""
        first = number * self.calls
        mx.eval([self._path(*self._tokens[(first + i) % len(self._tokens)]) for i in range(self.calls)])


def compare(
    layer: Layer, *, rounds: int = 15, baseline: Baseline = "gather", path: Path | None = None
) -> Result:
    """Time and check both paths on the same tokens.

    Args:
        path: what is held against the baseline; None for the fused kernel.

    Raises:
        SettingError: no fused kernel takes the call.
    """
    dtype = layer.tokens[0][0].dtype
    paths = {"baseline": _baseline(layer, baseline), "fused": path or _fused(layer, dtype)}
    batches = {name: _Batch(path, layer.tokens) for name, path in paths.items()}
    times = interleaved(batches, rounds=rounds)
    each = {name: [t / batches[name].calls for t in times[name]] for name in paths}
    # A few tokens of the call say as much as all.
    truth = naive.experts_in_float32(layer.experts(), *(t[:, :_CHECKED] for t in layer.tokens[0]))
    errors = {n: relative_rms(p(*layer.tokens[0])[:, :_CHECKED], truth) for n, p in paths.items()}
    ratios = [b / f for b, f in zip(each["baseline"], each["fused"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return Result(
        baseline_us=median(each["baseline"]) * 1e6,
        fused_us=median(each["fused"]) * 1e6,
        noise=(high - low) / 2 / middle,
        bytes_per_token=layer.bytes_per_token,
        baseline_error=errors["baseline"],
        fused_error=errors["fused"],
    )


def read_bandwidth(rounds: int = 7) -> float:
    """Bytes a second that this device reads, measured by summing a large array.

    The best of the rounds, because it is a ceiling. A GPU gets several sums at once: starting one and waiting
    for it takes the host a tenth of the time of the sum.

    Raises:
        SettingError: numba is missing or does not work, without which no sum reads that fast on the CPU.
    """
    count = EXPERT_BYTES // 4
    reads = 1
    if current_device() == "cpu":
        if why := cpu.unavailable():
            raise _declined("The read bandwidth of this CPU cannot be measured.", why)
        checksum = start.compiled().checksum
        numbers = np.ones(count, np.uint32)
        times = interleaved({"read": lambda _: checksum(numbers)}, rounds=rounds)
    else:
        reads = 8
        array = mx.ones((count,), mx.float32)
        mx.eval(array)
        times = interleaved({"read": lambda _: mx.eval([array.sum() for _ in range(reads)])}, rounds=rounds)
    return reads * 4 * count / min(times["read"])


def storage_of(mode: str, bits: int, group_size: int) -> Storage:
    """The storage that the options of a verb name; the microscaling formats fix bits and group.

    Raises:
        SettingError: affine with bits or a group size that MLX has not.
    """
    if mode == "plain":
        return Storage("plain", 0, 0)
    if mode == "affine":
        for name, value, known in (
            ("bits", bits, (2, 3, 4, 5, 6, 8)),
            ("group size", group_size, (32, 64, 128)),
        ):
            if value not in known:
                raise SettingError(
                    f"MLX has no affine format with this {name}.", expected=str(known), found=str(value)
                )
        return Storage("affine", bits, group_size)
    fixed: dict[str, Storage] = {
        "mxfp4": Storage("mxfp4", 4, 32),
        "mxfp8": Storage("mxfp8", 8, 32),
        "nvfp4": Storage("nvfp4", 4, 16),
    }
    return fixed[mode]


def default_dtype() -> str:
    """The activations' dtype that the engine uses on this device for a bfloat16 checkpoint."""
    return "float32" if current_device() == "cpu" else "bfloat16"


# The storages that tuning looks at, the most used ones first.
STORAGES = (
    Storage(),
    Storage("mxfp4", 4, 32),
    Storage("affine", 8, 64),
    Storage("affine", 6, 64),
    Storage("affine", 4, 32),
    Storage("nvfp4", 4, 16),
    Storage("mxfp8", 8, 32),
    Storage("affine", 5, 64),
    Storage("affine", 3, 64),
    Storage("affine", 2, 64),
    Storage("plain", 0, 0),
)
FEW_ROWS, MANY_ROWS = (2, 4, 8, 16), (32, 128, 512)


def tuned_timings(shapes: Sequence[Shape], storage: Storage, rounds: int) -> Iterator[Timing]:
    """Every path against the gather path: one row at every shape, more rows at the middle one.

    Args:
        shapes: by width.
    """
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}[default_dtype()]
    name = storage.name(dtype)
    fitting = [s for s in shapes if not (storage.group_size and (s.hidden | s.width) % storage.group_size)]
    for shape in fitting:
        yield compare(layer_of(shape, storage, None), rounds=rounds).timing(shape.width, name)
    middle = fitting[len(fitting) // 2 : len(fitting) // 2 + 1]
    for shape in middle:
        most = eligibility.LIMITS[current_device()].rows
        for rows in (r for r in FEW_ROWS if most is None or r <= most):
            layer = layer_of(shape, storage, None, rows=rows)
            yield compare(layer, rounds=rounds).timing(shape.width, name, rows)
        # A kernel for any number of rows needs no other path.
        for rows in MANY_ROWS if most is not None else ():
            layer = layer_of(shape, storage, None, rows=rows)
            path = many(layer, dtype)
            if isinstance(path, Decline):
                break
            yield compare(layer, rounds=5, path=path).timing(shape.width, name, rows, "many")


def layer_of(shape: Shape, storage: Storage, dtype: str | None, shared: int = 0, rows: int = 1) -> Layer:
    """``random_layer`` for a public shape, with a shared expert of a width where it is not 0."""
    dtypes = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    return random_layer(
        shape.hidden,
        shape.width,
        shape.experts,
        shape.top_k,
        activations.make(shape.activation, shape.alpha, shape.limit),
        storage=storage,
        dtype=dtypes[dtype or default_dtype()],
        bias=shape.bias,
        shared=shared,
        rows=rows,
    )


def about() -> dict[str, str]:
    """What figures must name: device, versions, date."""
    device = current_device()
    name = mx.device_info(mx.cpu if device == "cpu" else mx.gpu)["device_name"]
    cores = f", {len(os.sched_getaffinity(0))} cores" if device == "cpu" and sys.platform == "linux" else ""
    return {"device": f"{name}{cores} ({device})", "mlx": version("mlx"), "date": date.today().isoformat()}
