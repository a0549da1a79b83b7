"""Runs kernel text without a GPU: clang compiles it for the CPU and fibers play the threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels.source import Backend, Launch, text

HOST = Path(__file__).parent / "host"
CUDA_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
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
}


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
    """A GPU played by the CPU, for CUDA or Metal text."""

    clang: str
    kind: str
    folder: Path

    def run(
        self,
        backend: Backend,
        launch: Launch,
        inputs: Sequence[mx.array],
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
        change: Callable[[str], str] = lambda t: t,
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
        entry(launch.groups, launch.warps * 32, pointers)
        return [_read(m, s, d) for m, (s, d) in zip(made, outputs, strict=True)]

    def compile(self, source: str) -> Callable[..., None]:
        """The text's only kernel as a function of (groups, threads, pointers).

        Raises:
            RuntimeError: clang refused it; the message is clang's.
        """
        if self.kind == "cuda":
            source = source.replace(text("tensor.cu"), "")
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
        asked = "" if self.kind == "metal" else "host::asked.assign(threads, {{}});"
        call = f"{scope}{head[1]}({', '.join(arguments)});"
        program = (
            f'#include "{HOST / f"{self.kind}_host.h"}"\n{source}\n'
            'extern "C" void entry(int groups, int threads, void** p) {\n'
            f"{asked}\nhost::run(groups, threads, [=] {{ {call} }});\n}}\n"
        )
        number = len(list(self.folder.iterdir()))
        file, library = self.folder / f"{number}.cc", self.folder / f"{number}.so"
        file.write_text(program)
        command = [
            self.clang,
            "-std=c++17",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            str(file),
            "-o",
            str(library),
            "-lm",
            "-lstdc++",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return ctypes.CDLL(str(library)).entry


def _raw(a: mx.array) -> np.ndarray:
    return np.array(a.view(mx.uint16) if a.dtype in (mx.bfloat16, mx.float16) else a)


def _read(m: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    if dtype in (mx.bfloat16, mx.float16):
        return np.array(mx.array(m.view(np.uint16)).view(dtype).astype(mx.float32)).reshape(shape)
    return m.view(np.uint32 if dtype == mx.uint32 else np.float32).reshape(shape)


def _host(kind: str, factory: pytest.TempPathFactory) -> HostDevice:
    clang = shutil.which("clang")
    if clang is None:
        pytest.skip("clang is not installed: apt-get install clang")
    return HostDevice(clang, kind, factory.mktemp(kind))


@pytest.fixture(scope="session")
def host_metal(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    """Runs Metal launches on the CPU; skips where clang is not installed."""
    return _host("metal", tmp_path_factory)


@pytest.fixture(scope="session")
def host_cuda(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    """Runs CUDA launches on the CPU; skips where clang is not installed."""
    return _host("cuda", tmp_path_factory)
