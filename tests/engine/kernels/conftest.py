"""Runs kernel text without a GPU: clang compiles it for the CPU and fibers play the threads."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_experts.engine.kernels import activations, expert_weights, naive
from mlx_experts.engine.kernels.cpu import stacks
from mlx_experts.engine.kernels.cpu.products import amx
from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.launch_pair import Pair, arrays_of
from mlx_experts.engine.kernels.gpu.source import Backend, Launch, text
from mlx_experts.engine.kernels.request import Activation, KernelRequest

HOST = Path(__file__).parent / "host"
CUDA_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
}
_POINTER = re.compile(
    r"^\s*(const )?(?:(device|constant) )?(?:const )?(\w+)\* (\w+)(?: \[\[buffer\(\d+\)\]\])?$"
)
_ATTRIBUTE = re.compile(r"^\s*(uint3?) (\w+) \[\[\w+\]\]$")
_SIGNATURE = {
    "metal": re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?\]\])\) \{", re.S),
    "cuda": re.compile(r"__global__ void (\w+)\(\n(.*?)\) \{", re.S),
}
_ATTRIBUTE_VALUES = {
    "thread_index_in_simdgroup": "uint(host::lane())",
    "simdgroup_index_in_threadgroup": "uint(host::warp())",
    "threadgroup_position_in_grid": "uint3{uint(host::group), 0, 0}",
    "threadgroups_per_grid": "uint3{uint(host::groups), 1, 1}",
}
_GROUP_ARRAY = re.compile(r"^(#define ME_GROUP_ARRAY\(T, name, n\)).*$", re.M)
_GROUP_SPACE = {"metal": "threadgroup", "cuda": ""}
_POISON = "host::poison((void*)(uintptr_t)name, sizeof(name));"


@contextlib.contextmanager
def _stdout_to(path: Path) -> Iterator[None]:
    """The process's standard output, which MLX's C++ writes to, into a file."""
    kept = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def metal_text(
    backend: Backend,
    launch: Launch,
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> str:
    """The text, signature included, that MLX would hand to the Metal compiler."""
    dtypes = [*(a.dtype for a in inputs), *(d for _, d in outputs)]
    run = launch.make(backend, dtypes, [s for s, _ in outputs], verbose=True)
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "text"
        with _stdout_to(printed):
            mx.export_function(str(Path(folder) / "f.mlxfn"), lambda *a: run(list(a)), *inputs)
        return printed.read_text().split("```")[1]


def cuda_text(
    launch: Launch, inputs: Sequence[mx.array], outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]
) -> str:
    """The text that MLX would hand to the CUDA compiler, less its own includes."""
    arguments = [f"const {CUDA_TYPES[a.dtype]}* {n}" for n, a in zip(launch.inputs, inputs, strict=True)]
    arguments += [f"{CUDA_TYPES[d]}* {n}" for n, (_, d) in zip(launch.outputs, outputs, strict=True)]
    signature = ",\n    ".join(arguments)
    return (
        f"{launch.header}namespace mlx::core::cu {{\n__global__ void kernel(\n    {signature}) {{\n"
        f"{launch.source}\n}}\n}} // namespace mlx::core::cu\n"
    )


@dataclass(frozen=True)
class HostDevice:
    """A GPU played by the CPU, for CUDA or Metal text.

    Args:
        fibers: the library that plays the threads, compiled once for all kernels.
        folder: of this device alone; a text is compiled there once.
    """

    clang: str
    kind: str
    fibers: Path
    folder: Path
    compiled: dict[str, Callable[..., None]] = dataclasses.field(default_factory=dict)

    def run(
        self,
        backend: Backend,
        launch: Launch,
        inputs: Sequence[mx.array],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        change: Callable[[str], str] = lambda t: t,
        tokens: int = 1,
    ) -> list[np.ndarray]:
        """The launch's outputs as float32 (or as they are, when integers), from poisoned memory.

        ``change`` may alter the text first: a test of the test.
        """
        source = (
            metal_text(backend, launch, inputs, outputs)
            if self.kind == "metal"
            else cuda_text(launch, inputs, outputs)
        )
        entry = self.compile(change(source))
        held = [np.ascontiguousarray(_raw(a)) for a in inputs]
        made = [np.full(int(np.prod(s)) * d.size, 0xFF, np.uint8) for s, d in outputs]
        pointers = (ctypes.c_void_p * (len(held) + len(made)))(*(a.ctypes.data for a in [*held, *made]))
        entry(tokens * launch.groups, launch.warps * 32, pointers)
        return [_read(m, s, d) for m, (s, d) in zip(made, outputs, strict=True)]

    def call(
        self, source: str, inputs: Sequence[Sequence[float]], size: int, groups: int, threads: int
    ) -> np.ndarray:
        """A text with one float32 output run on float32 inputs."""
        held = [np.array(v, np.float32) for v in inputs]
        made = np.full(size, np.nan, np.float32)
        pointers = (ctypes.c_void_p * (len(held) + 1))(*(a.ctypes.data for a in [*held, made]))
        self.compile(source)(groups, threads, pointers)
        return made

    def compile(self, source: str) -> Callable[..., None]:
        """The text's only kernel as a function of (groups, threads, pointers).

        Raises:
            RuntimeError: clang refused it; the message is clang's.
        """
        if self.kind == "cuda":
            for name in ("tiles/tensor", "pieces/device", "tiles/one_device", "tiles/bulk_device"):
                source = source.replace(text(f"{name}.cu"), "")
        source = _GROUP_ARRAY.sub(
            rf"\1 alignas(16) static {_GROUP_SPACE[self.kind]} T name[n]; {_POISON}", source
        )
        head = _SIGNATURE[self.kind].search(source)
        assert head is not None
        arguments, count = [], 0
        for line in head[2].split(",\n"):
            if pointer := _POINTER.match(line):
                const, space, kind, _ = pointer.groups()
                arguments.append(f"({const or ''}{space or ''} {kind}*)(uintptr_t)p[{count}]")
                count += 1
            else:
                attribute = _ATTRIBUTE.match(line)
                assert attribute is not None, line
                arguments.append(_ATTRIBUTE_VALUES[attribute[2]])
        scope = "" if self.kind == "metal" else "mlx::core::cu::"
        call = f"{scope}{head[1]}({', '.join(arguments)});"
        # A block's memory begins without meaning.
        room = "mlx::core::cu::me_shared"
        poison = f"if (host::current == 0) memset({room}, 0xFF, sizeof({room})); "
        call = (poison if self.kind == "cuda" else "") + call
        program = (
            f'#include "{HOST / f"{self.kind}_host.h"}"\n{source}\n'
            f"static void body(void** p) {{ {call} }}\n"
            'extern "C" void entry(int groups, int threads, void** p) {\n'
            "host::run(groups, threads, body, p);\n}\n"
        )
        if program not in self.compiled:
            file = self.folder / f"{len(self.compiled)}.cc"
            file.write_text(program)
            library = _shared_library(self.clang, file, "-O1", str(self.fibers), "-nostdinc++", "-lm")
            self.compiled[program] = ctypes.CDLL(str(library)).entry
        return self.compiled[program]


def _shared_library(clang: str, file: Path, *options: str) -> Path:
    library = file.with_suffix(".so")
    command = [clang, "-std=c++17", "-w", "-shared", "-fPIC", str(file), "-o", str(library), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return library


_JOINED: weakref.WeakSet[Joined] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def _joined_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembers joined arrays, of which launches get the first words alone."""
    real = Joined.of

    def of(*args: Any, **kwargs: Any) -> Joined | None:
        made = real(*args, **kwargs)
        if made is not None:
            _JOINED.add(made)
        return made

    monkeypatch.setattr(Joined, "of", of)


def _raw(a: mx.array) -> np.ndarray:
    # Behind the first words of joined arrays lie the others.
    a = next((joined.whole for joined in _JOINED if joined.origin is a), a)
    return np.array(a.view(mx.uint16) if a.dtype in (mx.bfloat16, mx.float16) else a)


def _read(m: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    if dtype in (mx.bfloat16, mx.float16):
        return np.array(mx.array(m.view(np.uint16)).view(dtype).astype(mx.float32)).reshape(shape)
    return m.view(np.uint32 if dtype in (mx.uint32, mx.int32) else np.float32).reshape(shape)


@pytest.fixture(scope="session")
def host_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HostDevice]:
    """Makes the CPU a device of a kind; skips where clang is not installed."""
    clang = shutil.which("clang")
    if clang is None:
        pytest.skip("clang is not installed: apt-get install clang")
    copied = shutil.copy(HOST / "fibers.cc", tmp_path_factory.mktemp("host"))
    fibers = _shared_library(clang, Path(copied), "-O2", f"-I{HOST}", "-lstdc++")
    return lambda kind: HostDevice(clang, kind, fibers, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="session")
def host_metal(host_of: Callable[[str], HostDevice]) -> HostDevice:
    """Runs Metal launches on the CPU."""
    return host_of("metal")


@pytest.fixture(scope="session")
def host_cuda(host_of: Callable[[str], HostDevice]) -> HostDevice:
    """Runs CUDA launches on the CPU."""
    return host_of("cuda")


@dataclass(frozen=True)
class Case:
    """A few tokens and their experts, by the properties that kernels depend on.

    Args:
        down: format, bits and group size of the down projection where they differ.
        shared: width of a shared expert that is stored as the others are; 0 for none.
        weighed: bits of the row whose sigmoid weighs it (16 or 32: a plain row); 0 for none.
        joined: its gate and up projections are one matrix.
        rows: tokens.
    """

    dtype: mx.Dtype = mx.bfloat16
    hidden: int = 256
    width: int = 128
    experts: int = 5
    top_k: int = 3
    mode: str = "affine"
    bits: int = 4
    group: int = 64
    activation: str = "swiglu"
    alpha: float = 1.0
    limit: float = 0.0
    bias: bool = False
    global_scale: bool = False
    down: tuple[str, int, int] | None = None
    shared: int = 0
    weighed: int = 0
    joined: bool = False
    rows: int = 1

    def __str__(self) -> str:
        default = Case()
        values = {n: getattr(self, n) for n in self.__dataclass_fields__}
        return (
            "-".join(f"{n}={_short(v)}" for n, v in values.items() if v != getattr(default, n)) or "default"
        )


def _short(value: object) -> str:
    return str(value).rpartition(".")[2] if isinstance(value, mx.Dtype) else str(value).replace(" ", "")


@dataclass(frozen=True)
class Built:
    """A case's arrays and its truth."""

    experts: expert_weights.ExpertWeights
    request: KernelRequest
    x: mx.array
    indices: mx.array
    weights: mx.array
    truth: np.ndarray

    def distance(self, y: object) -> float:
        """Relative root mean square distance of a result to the truth."""
        got = np.array(y.astype(mx.float32)) if isinstance(y, mx.array) else np.asarray(y)
        return float(np.sqrt(((got - self.truth) ** 2).mean() / (self.truth**2).mean()))

    def run_on(
        self, host: HostDevice, backend: Backend, pair: Pair, change: Callable[[str], str]
    ) -> np.ndarray:
        """Both launches on the CPU."""
        up, down = self.launch_inputs(pair)
        tokens = self.x.shape[0]
        (act,) = host.run(backend, pair.up, up, [((tokens * pair.words,), mx.float32)], change, tokens)
        down[0] = mx.array(act)
        return host.run(backend, pair.down, down, [(self.x.shape, self.x.dtype)], change, tokens)[0]

    def launch_inputs(self, pair: Pair) -> tuple[list[mx.array], list[mx.array]]:
        """What each launch reads, ``act`` still empty."""
        held = arrays_of(self.experts) | {"x": self.x, "indices": self.indices, "weights": self.weights}
        held["act"] = mx.zeros((self.x.shape[0] * pair.words,))
        return [held[n] for n in pair.up.inputs], [held[n] for n in pair.down.inputs]


def build(case: Case, device: str) -> Built:
    """Random experts of a case, quantised by MLX, and what they make of a random token in float32."""
    mx.random.seed(7)
    activation = activations.make(case.activation, case.alpha, case.limit)
    container = (SwitchGLU if activation.gated else SwitchMLP)(
        case.hidden, case.width, case.experts, bias=case.bias
    )
    for name, module in container.children().items():
        if "weight" not in module:
            continue
        module.set_dtype(case.dtype)
        if case.bias:
            module.bias = mx.random.normal(module.bias.shape).astype(case.dtype)
        mode, bits, group = (case.mode, case.bits, case.group)
        if case.down is not None and name in ("down_proj", "fc2"):
            mode, bits, group = case.down
        if mode != "plain":
            container[name] = module.to_quantized(group, bits, mode=mode, global_scale=case.global_scale)
    experts = expert_weights.read(container, activation)
    assert experts is not None
    if case.shared:
        experts = dataclasses.replace(experts, shared=_shared(case, activation))
    request = expert_weights.request_of(
        experts, activation, rows=case.rows, top_k=case.top_k, dtype=case.dtype, device=device
    )
    x = mx.random.normal((case.rows, case.hidden)).astype(case.dtype)
    draw = np.random.default_rng(7)
    chosen = np.stack([draw.permutation(case.experts)[: case.top_k] for _ in range(case.rows)])
    indices = mx.array(chosen.astype(np.uint32))
    weights = mx.softmax(mx.random.normal((case.rows, case.top_k)), axis=-1)
    truth = np.array(naive.experts_in_float32(experts, x, indices, weights))
    return Built(experts, request, x, indices, weights, truth)


def _shared(case: Case, activation: Activation) -> expert_weights.SharedExpertWeights:
    """A shared expert of MLX's own layers."""

    def dense(inputs: int, outputs: int, mode: str, bits: int, group: int) -> nn.Module:
        layer = nn.Linear(inputs, outputs, bias=case.bias)
        layer.set_dtype(case.dtype)
        if case.bias:
            layer.bias = mx.random.normal(layer.bias.shape).astype(case.dtype)
        return layer if mode == "plain" else nn.QuantizedLinear.from_linear(layer, group, bits, mode)

    stored = (case.mode, case.bits, case.group)
    gated = activation.gated and not case.joined
    parts = {"gate": dense(case.hidden, case.shared, *stored)} if gated else {}
    first, rows = ("gate_up", 2 * case.shared) if case.joined else ("up", case.shared)
    parts[first] = dense(case.hidden, rows, *stored)
    parts["down"] = dense(case.shared, case.hidden, *(case.down or stored))
    gate = None
    if case.weighed:
        gate = dense(case.hidden, 1, "plain" if case.weighed > 8 else "affine", case.weighed, 64)
    packed = expert_weights.read_shared(parts, activation, gate)
    assert packed is not None
    return packed


@pytest.fixture(scope="session")
def build_case() -> Callable[[Case, str], Built]:
    """Builds the experts of a case."""
    return build


@pytest.fixture(scope="session")
def case_type() -> type[Case]:
    """The class of cases, for tests that make their own."""
    return Case


@pytest.fixture(scope="session")
def cuda_text_of() -> Callable[[Built, Pair], list[str]]:
    """The text of both launches as the CUDA compiler gets it."""

    def texts(built: Built, pair: Pair) -> list[str]:
        up, down = built.launch_inputs(pair)
        return [
            cuda_text(pair.up, up, [((pair.words,), mx.float32)]),
            cuda_text(pair.down, down, [(built.x.shape, built.x.dtype)]),
        ]

    return texts


@pytest.fixture(params=["vectors", "matrix unit"])
def machine(request, monkeypatch):
    """Both ways to multiply many rows, where the processor has the second."""
    if request.param == "vectors":
        monkeypatch.setattr(stacks, "unit_functions", lambda projection: None)
    elif not amx.available():
        pytest.skip("the processor has no matrix unit")
    return request.param
