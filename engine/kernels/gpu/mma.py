"""The tensor-core launches: which request they take, and how the work is cut into blocks.

They take affine 4- and 8-bit weights with 16-bit scales under 16-bit activations; everything else stays with
the warp-per-row launches. ``mma.cu`` says how the product is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_experts.engine.kernels.expert_weights import ExpertWeights
from mlx_experts.engine.kernels.gpu.source import (
    WARP,
    Backend,
    Launch,
    activation_text,
    add_down_bias,
    bias_text,
    defines,
    down_arrays,
    is_weighed,
    pick,
    row_values,
    share_text,
    shared_settings,
    shared_width,
    text,
    up_arrays,
    weigh_text,
)
from mlx_experts.engine.kernels.request import KernelRequest, Projection

# Nibbles of a row that a warp takes in one step.
STEP = 128
_VECTOR = 16
_SCALE_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half"}


# From this many tiles on, the tiles themselves fill the device.
_MANY_TILES = 2048
# Steps of act that a warp of launch B has on their way.
_STAGES = 4


@dataclass(frozen=True)
class CutUp:
    """How launch A is cut.

    Args:
        teams: tiles in a block.
        split: warps a tile, which share out its units.
    """

    teams: int
    split: int

    @property
    def warps(self) -> int:
        """Warps a block."""
        return self.teams * self.split


@dataclass(frozen=True)
class CutDown:
    """How launch B is cut.

    Args:
        tiles: tiles in a block.
        warps: warps a block, which share out the units of all experts.
    """

    tiles: int
    warps: int


def wide(p: Projection) -> int:
    """Nibbles a weight."""
    return p.bits // 4


def steps(p: Projection) -> int:
    """Steps a row."""
    return p.cols * wide(p) // STEP


def unit(p: Projection, halves: int) -> int:
    """Steps that a warp sums over at once: as the product has columns, but no more than 4 (2 with halves)."""
    return min(4 // halves, 8 // halves * p.group_size * wide(p) // STEP)


def units(p: Projection, halves: int) -> int:
    """Units a row."""
    return -(-steps(p) // unit(p, halves))


def takes(p: Projection) -> bool:
    """Whether a projection's storage fits the tensor-core form, whatever the cut."""
    return (
        p.format == "affine"
        and p.bits in (4, 8)
        and p.dtype in _SCALE_TYPES
        and p.cols * wide(p) % STEP == 0
        and p.cols % p.group_size == 0
    )


def takes_up(request: KernelRequest) -> bool:
    """Whether launch A has a tensor-core form; a shared expert is stored as the others are."""
    gate, up = request.gate, request.up
    alike = gate is None or (gate.format, gate.bits, gate.group_size, gate.dtype) == (
        up.format,
        up.bits,
        up.group_size,
        up.dtype,
    )
    whole = all(rows % rows_a_tile(request) == 0 for rows in (up.rows, shared_width(request)))
    return alike and takes(up) and request.dtype in _SCALE_TYPES and whole


def takes_down(request: KernelRequest) -> bool:
    """Whether launch B has one; it reads what the tensor-core launch A leaves."""
    shared = request.shared is None or takes(request.shared.expert.down)
    return takes_up(request) and takes(request.down) and shared and request.down.rows % 16 == 0


def rows_a_tile(request: KernelRequest) -> int:
    """Expert rows in one tile of launch A: a gated tile is half gate, half up."""
    return 16 if request.gate is None else 8


def cut_up(request: KernelRequest) -> CutUp:
    """The cut of launch A: small blocks, of which a multiprocessor holds several.

    Measured on an H200: 768 tiles want four warps each, 3584 tiles want two.
    """
    many = row_values(request) // rows_a_tile(request) >= _MANY_TILES
    split = min(2 if many else 4, units(request.up, _halves(request)))
    return CutUp(teams=max(1, 4 // split) if many else 1, split=split)


def cut_down(request: KernelRequest) -> CutDown:
    """The cut of launch B: one block a multiprocessor, as near as the width allows (measured on an H200)."""
    total = request.top_k * units(request.down, 2)
    total += units(request.shared.expert.down, 2) if request.shared else 0
    tiles, most = (2, 16) if request.down.rows % 32 == 0 and request.down.rows >= 4096 else (1, 24)
    # Equal shares: with one warp fewer, some warp would have a unit more.
    return CutDown(tiles, warps=-(-total // -(-total // most)))


def _bounded(threads: int) -> str:
    """Launch bounds, by way of the word that MLX writes before a kernel's name.

    Without them the compiler may take more registers than a block of this size has.
    """
    bounds = f"__attribute__((global)) __attribute__((launch_bounds({threads})))"
    return f"#undef __global__\n#define __global__ {bounds}\n"


def _layout(**vectors: int) -> tuple[dict[str, int], int]:
    """Where each part of shared memory begins, in 16-byte vectors, and the bytes of all."""
    at, begins = 0, {}
    for name, size in vectors.items():
        begins[f"AT_{name}"] = at
        at += size
    return begins, at * _VECTOR


def up_layout(request: KernelRequest, cut: CutUp) -> tuple[dict[str, int], int]:
    """Shared memory of launch A."""
    up = request.up
    return _layout(
        X=steps(up) * 16 * _halves(request),
        ZEROS=13,
        SUMS=-(-up.cols // up.group_size // 4),
        RED=cut.warps * 4,
    )


def down_layout(cut: CutDown) -> tuple[dict[str, int], int]:
    """Shared memory of launch B."""
    return _layout(
        ZEROS=cut.warps * 13,
        RED=cut.warps * cut.tiles * 4,
        RING=cut.warps * _STAGES * 32,
    )


def _halves(request: KernelRequest) -> int:
    """Parts that x is split into: a bfloat16 is its own high part."""
    return 1 if request.dtype == "bfloat16" else 2


def act_words(request: KernelRequest) -> int:
    """Float32 words that launch A leaves for launch B: two parts of every nibble's input, and the sums."""
    values = row_values(request)
    return values * wide(request.down) + values // 8


def mma_up(
    backend: Backend,
    experts: ExpertWeights,
    request: KernelRequest,
    cut: CutUp,
    *,
    fragments: bool,
) -> Launch:
    """Launch A. With ``fragments`` its output is what ``mma_down`` reads, else ``act`` as float32."""
    up, two = request.up, request.shared is not None
    begins, room = up_layout(request, cut)
    words = act_words(request) if fragments else row_values(request)
    tiles = -(-row_values(request) // (rows_a_tile(request) * cut.teams))
    low = pick("up" if request.gate is None else "gate", "##p", two)
    settings = defines(
        {
            "H": request.input_width,
            "F": request.expert_width,
            "K": request.top_k,
            "GROUP": up.group_size,
            "WIDE": wide(up),
            "DOWN_WIDE": wide(request.down),
            "UNIT": unit(up, _halves(request)),
            "HALVES": _halves(request),
            "GATED": int(request.gate is not None),
            "FRAGMENTS": int(fragments),
            "LOW(p)": low,
            "HIGH(p)": pick("up", "##p", two),
            "END_GATE(v)": "v" if request.gate is None else bias_text("gate", request.gate, "v", "row", two),
            "END_UP(v)": bias_text("up", up, "v", "up_row", two),
            "TEAMS": cut.teams,
            "SPLIT": cut.split,
            **begins,
            **shared_settings(experts, request, words),
        }
    )
    return Launch(
        label="experts_up_mma",
        inputs=("x", "indices", *up_arrays(experts)),
        outputs=("act",),
        header=text(backend.prelude)
        + settings
        + weigh_text(request)
        + (text("rows.h") if is_weighed(request) else "")
        + text("tensor.cu")
        + text("mma.cu")
        + (activation_text(request.activation) or "")
        + _bounded(cut.warps * WARP),
        source=backend.opening + text("mma_up.cu"),
        groups=tiles + is_weighed(request),
        warps=cut.warps,
        shared=room,
    )


def mma_down(backend: Backend, experts: ExpertWeights, request: KernelRequest, cut: CutDown) -> Launch:
    """Launch B on the fragments of ``mma_up``."""
    down = request.down
    begins, room = down_layout(cut)
    settings = defines(
        {
            "H": down.rows,
            "F": request.expert_width,
            "K": request.top_k,
            "GROUP": down.group_size,
            "WIDE": wide(down),
            "UNIT": unit(down, 2),
            "SCALE_TYPE": _SCALE_TYPES[down.dtype],
            "FRAGMENTS": 0,
            "SHARE": share_text(request),
            "ADD_BIAS": add_down_bias(request),
            "TILES": cut.tiles,
            "WARPS": cut.warps,
            "STAGES": _STAGES,
            **begins,
            **shared_settings(experts, request, act_words(request)),
        }
    )
    return Launch(
        label="experts_down_mma",
        inputs=("act", "indices", "weights", *down_arrays(experts)),
        outputs=("y",),
        header=text(backend.prelude)
        + settings
        + text("tensor.cu")
        + text("mma.cu")
        + _bounded(cut.warps * WARP),
        source=backend.opening + text("mma_down.cu"),
        groups=down.rows // (16 * cut.tiles),
        warps=cut.warps,
        shared=room,
    )
