"""Machine code from LLVM functions that this package writes, kept on disk between processes.

numba compiles the drivers; the inner products are written as LLVM vectors and compiled here, because numba
does not keep functions made of intrinsics on disk. A function takes and returns nothing but 64-bit integers,
which are addresses and counts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core.compiler_lock import global_compiler_lock
from platformdirs import user_cache_path

from mlx_experts.registry import settings

# Sums may be reordered; infinities and NaNs keep their meaning.
FLAGS = ("reassoc", "contract", "nsz")
I64 = ir.IntType(64)


class Builder(ir.IRBuilder):
    """An IR builder whose float sums and products may be reordered and contracted."""

    def fadd(self, lhs: Any, rhs: Any, name: str = "", flags: Any = FLAGS) -> Any:
        """``lhs + rhs``."""
        return super().fadd(lhs, rhs, name, flags)

    def fsub(self, lhs: Any, rhs: Any, name: str = "", flags: Any = FLAGS) -> Any:
        """``lhs - rhs``."""
        return super().fsub(lhs, rhs, name, flags)

    def fmul(self, lhs: Any, rhs: Any, name: str = "", flags: Any = FLAGS) -> Any:
        """``lhs * rhs``."""
        return super().fmul(lhs, rhs, name, flags)


@dataclass(frozen=True, eq=False)
class Native:
    """A compiled function.

    Args:
        address: where its code lies, as long as this object lives.
        ctypes: the function for callers in Python.
        engine: what owns the code.
    """

    address: int
    ctypes: Any
    engine: Any


@lru_cache(maxsize=1)
def target() -> tuple[str, str]:
    """The processor's name and features as numba compiles for them."""
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    return (
        llvm.get_host_cpu_name() if name is None else name,
        llvm.get_host_cpu_features().flatten() if features is None else features,
    )


@lru_cache(maxsize=1)
def _features() -> frozenset[str]:
    """What the processor that is compiled for can do, as far as it is known."""
    return frozenset(f[1:] for f in target()[1].split(",") if f.startswith("+"))


def is_x86() -> bool:
    """Whether this is an Intel or AMD processor."""
    return str(llvm.get_process_triple()).startswith(("x86_64", "i386", "i686"))


def is_arm() -> bool:
    """Whether this is a 64-bit ARM processor."""
    return str(llvm.get_process_triple()).startswith(("aarch64", "arm64"))


def lacking() -> str:
    """The instructions that the kernels count on and this processor lacks, in words."""
    wanted = ("avx2", "fma", "f16c") if is_x86() else ()
    return ", ".join(name.upper() for name in wanted if name not in _features())


def has(*names: str) -> bool:
    """Whether the processor that is compiled for has these features of LLVM's."""
    return is_x86() and _features().issuperset(names)


def vector_lanes() -> int:
    """float32 lanes of this processor's widest vectors: 16, 8 or 4."""
    if "avx512f" in _features():
        return 16
    return 8 if is_x86() else 4


def function(name: str, arguments: int, write: Callable[[Builder, list[Any]], None]) -> Native:
    """Compile a function of ``arguments`` 64-bit integers, or read it from the cache folder.

    Args:
        write: writes the body, given a builder in its first block and the arguments; it does not return.
    """
    # LLVM's state is shared with numba, which compiles in other threads under this lock.
    with global_compiler_lock:
        return _written(name, arguments, write)


def _written(name: str, arguments: int, write: Callable[[Builder, list[Any]], None]) -> Native:
    module = ir.Module(name)
    module.triple = llvm.get_process_triple()
    written = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
    builder = Builder(written.append_basic_block())
    write(builder, list(written.args))
    builder.ret_void()
    return _loaded(name, arguments, _object_code(str(module)))


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = target()
    made = llvm.Target.from_triple(llvm.get_process_triple())
    return made.create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def _object_code(text: str) -> bytes:
    """The object code of a module, from the cache folder where it was compiled before."""
    key = hashlib.sha256("\0".join((text, *target(), llvmlite.__version__)).encode()).hexdigest()
    path = folder() / f"{key}.o"
    kept = _read(path)
    if kept is not None:
        return kept
    machine = _machine()
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    code: bytes = machine.emit_object(module)
    _keep(path, code)
    return code


# What holds machine code. Two threads may ask for one function at once, and both keep its address.
_ENGINES: list[Any] = []


def _loaded(name: str, arguments: int, code: bytes) -> Native:
    empty = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(empty, _machine(), numba.config.USE_LLVMLITE_MEMORY_MANAGER)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(name)
    _ENGINES.append(engine)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
    return Native(address, kind(address), engine)


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where object code is kept: in ``MLX_EXPERTS_CACHE_DIR``, or in the user's cache folder."""
    base = settings.read().cache_dir or user_cache_path("mlx-experts", appauthor=False)
    return Path(base) / "kernels"


def _read(path: Path) -> bytes | None:
    """What a file of object code holds, or None where there is none or it is damaged."""
    try:
        held = path.read_bytes()
    except OSError:
        return None
    digest, code = held[:32], held[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Write object code behind its digest; without a folder to write to the next process compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as beside:
            beside.write(hashlib.sha256(code).digest() + code)
        os.replace(beside.name, path)
    except OSError:
        return
