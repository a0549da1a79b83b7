"""What a kernel is asked to do, as plain data, and the two answers a gate may give.

Nothing here imports MLX: gates are pure functions of these request and are tested without a device.
Shape letters used in this folder: E experts, K experts per token, H model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["affine", "mxfp4", "mxfp8", "nvfp4", "plain"]
Device = Literal["cpu", "cuda", "metal"]
Activations = Literal["float32", "int8"]
"""What the CPU's kernels multiply activations as."""
MAX_TOP_K = 32
"""The most experts a token that the kernels of the experts and of the router take."""


@dataclass(frozen=True)
class Activation:
    """An expert activation by name, with its constants.

    Args:
        name: a name known to ``engine.activations``.
        alpha: slope inside the sigmoid of ``swiglu_oai``.
        limit: clamp bound; 0 means no clamp.
        gated: whether there is a gate projection beside the up projection.
    """

    name: str
    alpha: float = 1.0
    limit: float = 0.0
    gated: bool = True


@dataclass(frozen=True)
class Projection:
    """One stack of expert matrices ``[E, rows, cols]`` and how it is stored.

    Args:
        dtype: dtype name of the scales (affine) or of the weights (plain); of no meaning otherwise.
        bits: bits a weight (16 or 32 when plain).
        group_size: weights that share a scale; 0 when plain.
        bias: whether a bias ``[E, rows]`` is added to the product.
        global_scale: whether there is one more float32 scale for each expert (nvfp4).
    """

    format: Format
    bits: int
    group_size: int
    rows: int
    cols: int
    dtype: str
    bias: bool = False
    global_scale: bool = False

    @property
    def storage(self) -> str:
        """How the weights are stored, in words: what measured bounds are kept by."""
        return storage_name(self.format, self.bits, self.group_size)


def storage_name(format: str, bits: int, group_size: int) -> str:
    """A storage in words, for example ``affine 4-bit g64`` or ``plain 16-bit``."""
    return f"{format} {bits}-bit" + (f" g{group_size}" if group_size else "")


@dataclass(frozen=True)
class KernelRequest:
    """Everything a gate may look at.

    Args:
        rows: token rows in this call.
        dtype: dtype name of the activations: ``float16``, ``bfloat16`` or ``float32``.
        adapted: a projection is not the plain container (for example wrapped by a LoRA adapter).
        shared: the shared expert that the same launches are to add, or None.
    """

    rows: int
    top_k: int
    num_experts: int
    gate: Projection | None
    up: Projection
    down: Projection
    activation: Activation
    dtype: str
    device: Device
    training: bool = False
    adapted: bool = False
    shared: SharedRequest | None = None

    @property
    def input_width(self) -> int:
        """H, the width of the expert's input."""
        return self.up.cols

    @property
    def expert_width(self) -> int:
        """F, the width between the up and the down projection."""
        return self.up.rows


@dataclass(frozen=True)
class SharedRequest:
    """A shared expert: what a kernel would be asked for it alone, and the row whose sigmoid weighs it.

    Args:
        expert: one expert, picked once.
        gate: a matrix of one row, or None where the shared expert is added as it is.
    """

    expert: KernelRequest
    gate: Projection | None


@dataclass(frozen=True)
class Accept:
    """The kernel takes the call."""

    kernel: str


@dataclass(frozen=True)
class Decline:
    """The kernel leaves the call to the gather path.

    Args:
        rule: the rule's name, stable enough to count by.
        wanted: what the rule asks for.
        got: what it found.
        hint: what would turn the call into a fused one, or why nothing would.
    """

    rule: str
    wanted: str
    got: str
    hint: str

    def __str__(self) -> str:
        return f"{self.rule}: wanted {self.wanted}, got {self.got}"


Verdict = Accept | Decline
