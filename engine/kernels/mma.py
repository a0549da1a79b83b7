"""The tensor-core launches: which facts they take, and how the work is cut into blocks.

They take affine 4- and 8-bit weights with 16-bit scales under 16-bit activations; everything else stays with
the warp-per-row launches. ``mma.cu`` says how the product is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_experts.engine.kernels.facts import ExpertFacts, Projection
from mlx_experts.engine.kernels.pack import PackedExperts
from mlx_experts.engine.kernels.source import (
    Backend,
    Launch,
    activation_text,
    add_down_bias,
    array_names,
    bias_text,
    defines,
    text,
)

# Nibbles of a row that a warp takes in one step.
STEP = 128
_VECTOR = 16
_HALF_FLOATS = ("bfloat16", "float16")


@dataclass(frozen=True)
class Cut:
    """How a launch is cut.

    Args:
        tiles: 16-row tiles in a block.
        warps: warps in a block, which share out the steps.
        stages: steps of weights that a warp has in flight.
    """

    tiles: int
    warps: int
    stages: int


def wide(p: Projection) -> int:
    """Nibbles a weight."""
    return p.bits // 4


def steps(p: Projection) -> int:
    """Steps a row."""
    return p.cols * wide(p) // STEP


def span(p: Projection) -> int:
    """Nibbles of a step that share a scale."""
    return min(p.group_size * wide(p), STEP)


def takes(p: Projection) -> bool:
    """Whether a projection's storage fits the tensor-core form, whatever the cut."""
    return (
        p.format == "affine"
        and p.bits in (4, 8)
        and p.dtype in _HALF_FLOATS
        and p.cols * wide(p) % STEP == 0
        and p.cols % p.group_size == 0
    )


def takes_up(facts: ExpertFacts) -> bool:
    """Whether launch A has a tensor-core form."""
    gate, up = facts.gate, facts.up
    alike = gate is None or (gate.format, gate.bits, gate.group_size, gate.dtype) == (
        up.format,
        up.bits,
        up.group_size,
        up.dtype,
    )
    return alike and takes(up) and facts.dtype in _HALF_FLOATS and up.rows % rows_a_tile(facts) == 0


def takes_down(facts: ExpertFacts) -> bool:
    """Whether launch B has one; it reads what the tensor-core launch A leaves."""
    return takes_up(facts) and takes(facts.down) and facts.down.rows % 16 == 0


def rows_a_tile(facts: ExpertFacts) -> int:
    """Expert rows in one tile of launch A: a gated tile is half gate, half up."""
    return 16 if facts.gate is None else 8


def cut_up(facts: ExpertFacts) -> Cut:
    """The cut of launch A: about four steps a warp, all of them in flight."""
    n = steps(facts.up)
    warps = min(8, max(1, n // 4))
    return Cut(tiles=1, warps=warps, stages=min(4, -(-n // warps)))


def cut_down(facts: ExpertFacts) -> Cut:
    """The cut of launch B: one block a multiprocessor, as near as the width allows."""
    pairs = facts.top_k * steps(facts.down)
    tiles = 2 if facts.down.rows % 32 == 0 and facts.down.rows >= 4096 else 1
    warps = min(16, max(1, pairs // 3))
    return Cut(tiles=tiles, warps=warps, stages=min(4, -(-pairs // warps)))


def _layout(**vectors: int) -> tuple[dict[str, int], int]:
    """Where each part of shared memory begins, in 16-byte vectors, and the bytes of all."""
    at, begins = 0, {}
    for name, size in vectors.items():
        begins[f"AT_{name}"] = at
        at += size
    return begins, at * _VECTOR


def up_layout(facts: ExpertFacts, cut: Cut) -> tuple[dict[str, int], int]:
    """Shared memory of launch A."""
    up = facts.up
    return _layout(
        X=steps(up) * 16 * _halves(facts),
        SUMS=-(-steps(up) * STEP // span(up) // 4),
        RED=cut.warps * cut.tiles * 4,
        SCALES=4 * cut.tiles * (up.cols // up.group_size),
        RING=cut.warps * cut.stages * cut.tiles * 64,
    )


def down_layout(facts: ExpertFacts, cut: Cut) -> tuple[dict[str, int], int]:
    """Shared memory of launch B."""
    down = facts.down
    pairs = facts.top_k * steps(down)
    return _layout(
        SUMS=-(-pairs * STEP // span(down) // 4),
        RED=cut.warps * cut.tiles * 4,
        SCALES=4 * facts.top_k * cut.tiles * (down.cols // down.group_size),
        RING=cut.warps * cut.stages * (cut.tiles * 64 + 32),
    )


def _halves(facts: ExpertFacts) -> int:
    """Parts that x is split into: a bfloat16 is its own high part."""
    return 1 if facts.dtype == "bfloat16" else 2


def act_words(facts: ExpertFacts) -> int:
    """Float32 words that launch A leaves for launch B: two parts of every nibble's input, and the sums."""
    values = facts.top_k * facts.expert_width
    return values * wide(facts.down) + values // 8


def mma_up(
    backend: Backend, experts: PackedExperts, facts: ExpertFacts, cut: Cut, *, fragments: bool
) -> Launch:
    """Launch A. With ``fragments`` its output is what ``mma_down`` reads, else ``act`` as float32."""
    up = facts.up
    begins, shared = up_layout(facts, cut)
    settings = defines(
        {
            "H": facts.input_width,
            "F": facts.expert_width,
            "K": facts.top_k,
            "GROUP": up.group_size,
            "WIDE": wide(up),
            "DOWN_WIDE": wide(facts.down),
            "SPAN": span(up),
            "HALVES": _halves(facts),
            "GATED": int(facts.gate is not None),
            "FRAGMENTS": int(fragments),
            "LOW(p)": "up_##p" if facts.gate is None else "gate_##p",
            "HIGH(p)": "up_##p",
            "END_GATE(v)": "v" if facts.gate is None else bias_text("gate", facts.gate, "v", "at + r"),
            "END_UP(v)": bias_text("up", up, "v", "at + r"),
            "TILES": cut.tiles,
            "WARPS": cut.warps,
            "STAGES": cut.stages,
            **begins,
        }
    )
    names = [*(array_names("gate", experts.gate) if experts.gate else ()), *array_names("up", experts.up)]
    return Launch(
        label="experts_up_mma",
        inputs=("x", "indices", *names),
        outputs=("act",),
        header=text(backend.prelude)
        + settings
        + text("tensor.cu")
        + text("mma.cu")
        + (activation_text(facts.activation) or ""),
        source=backend.opening + text("mma_up.cu"),
        groups=facts.top_k * facts.expert_width // (rows_a_tile(facts) * cut.tiles),
        warps=cut.warps,
        shared=shared,
    )


def mma_down(backend: Backend, experts: PackedExperts, facts: ExpertFacts, cut: Cut) -> Launch:
    """Launch B on the fragments of ``mma_up``."""
    down = facts.down
    begins, shared = down_layout(facts, cut)
    settings = defines(
        {
            "H": down.rows,
            "F": facts.expert_width,
            "K": facts.top_k,
            "GROUP": down.group_size,
            "WIDE": wide(down),
            "SPAN": span(down),
            "FRAGMENTS": 0,
            "ADD_BIAS": add_down_bias(down),
            "TILES": cut.tiles,
            "WARPS": cut.warps,
            "STAGES": cut.stages,
            **begins,
        }
    )
    return Launch(
        label="experts_down_mma",
        inputs=("act", "indices", "weights", *array_names("down", experts.down)),
        outputs=("y",),
        header=text(backend.prelude) + settings + text("tensor.cu") + text("mma.cu"),
        source=backend.opening + text("mma_down.cu"),
        groups=down.rows // (16 * cut.tiles),
        warps=cut.warps,
        shared=shared,
    )
