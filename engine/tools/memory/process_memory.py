"""What a process that runs a model takes beside the model."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx

from mlx_experts.engine.kernels import fused_kernel

# What the CPU's kernels and the rest of a first call take: measured with numba 0.68 on x86-64.
_KERNELS = 120 * 10**6
# What a tokenizer takes, for each byte of its file: an estimate, since its tables are built of it.
_TOKENIZER = 12


def process_bytes(folder: Path | None) -> int:
    """Bytes of this process, of the kernels that it will compile, and of the checkpoint's tokenizer.

    Args:
        folder: of the checkpoint; None where it is not on this machine.
    """
    kernels = 0
    if mx.default_device().type == mx.DeviceType.cpu and fused_kernel("cpu").unavailable() is None:
        kernels = _KERNELS
    file = None if folder is None else folder / "tokenizer.json"
    words = file.stat().st_size if file is not None and file.is_file() else 0
    return resident_bytes() + kernels + _TOKENIZER * words


def resident_bytes() -> int:
    """Bytes of memory that this process holds now, or its most so far where the system tells no more."""
    import resource

    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
