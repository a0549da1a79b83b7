"""The tensor-core launches: which request they take, and how the work is cut into blocks.

They take every format under 16-bit activations; float32 activations and float32 weights stay with the
warp-per-row launches. ``chunk.cu`` says how the product is laid out, and a codec file (``codec_*.cu``) how
the codes of a format become bfloat16 values.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_experts.engine.kernels.expert_weights import ExpertWeights
from mlx_experts.engine.kernels.gpu.source import (
    NVFP4_UNIT,
    Backend,
    Launch,
    activation_text,
    add_down_bias,
    bias_text,
    bounded,
    defines,
    down_arrays,
    is_weighed,
    opening,
    pick,
    row_values,
    share_text,
    shared_settings,
    shared_width,
    text,
    token_settings,
    up_arrays,
    weigh_text,
)
from mlx_experts.engine.kernels.request import KernelRequest, Projection

# Codes of a row that a warp takes in one step, and those of one lane.
STEP, CHUNK = 128, 32
_VECTOR = 16
_SCALE_TYPES = {
    "bfloat16": "__nv_bfloat16",
    "float16": "__half",
    "float32": "float",
    "uint8": "uint8_t",
}
_ACTIVATIONS = ("bfloat16", "float16")
_CODECS = {
    "affine": "codec_affine.cu",
    "mxfp4": "codec_float.cu",
    "mxfp8": "codec_float.cu",
    "nvfp4": "codec_float.cu",
    "plain": "codec_plain.cu",
}

# From this many tiles on, the tiles themselves fill the device.
_MANY_TILES = 1024
# Steps of act that a warp of launch B has on their way.
_STAGES = 4
# Words of one row that a lane has on their way in launch A and in launch B.
_HELD_UP, _HELD_DOWN = 16, 8


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
    """Codes a weight: an affine weight of 8 bits is two of 4."""
    return 2 if p.format == "affine" and p.bits == 8 else 1


def code_bits(p: Projection) -> int:
    """Bits of one code."""
    return p.bits // wide(p)


def steps(p: Projection) -> int:
    """Steps a row, the last of which may be short."""
    return -(-p.cols * wide(p) // STEP)


def span(p: Projection, halves: int) -> int:
    """Codes whose products share a column: a scale group's, but a whole chunk's where groups are smaller."""
    return max(p.group_size * wide(p), CHUNK) if p.group_size else STEP * unit(p, halves)


def unit(p: Projection, halves: int) -> int:
    """Steps that a warp sums over at once: as the product has columns and registers have room for."""
    if not p.group_size:
        return 1
    columns = 8 // halves * max(p.group_size * wide(p), CHUNK) // STEP
    most = min(4 // halves, columns, max(1, 16 // code_bits(p)))
    # A power of two: a lane reads the scales of two neighbouring groups at once.
    return 1 << most.bit_length() - 1


def units(p: Projection, halves: int) -> int:
    """Units a row."""
    return -(-steps(p) // unit(p, halves))


def takes(p: Projection) -> bool:
    """Whether a projection's storage fits the tensor-core form, whatever the cut."""
    stored = p.dtype in _SCALE_TYPES if p.format == "affine" else p.bits <= 16
    whole = p.cols % CHUNK == 0 and (not p.group_size or p.cols % p.group_size == 0)
    return p.format in _CODECS and stored and whole


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
    return alike and takes(up) and request.dtype in _ACTIVATIONS and whole


def takes_down(request: KernelRequest) -> bool:
    """Whether launch B has one; it reads what the tensor-core launch A leaves."""
    shared = request.shared is None or takes(request.shared.expert.down)
    # Sums of eight values are exchanged within one tile's rows.
    return takes_up(request) and takes(request.down) and shared and request.down.rows % 16 == 0


def rows_a_tile(request: KernelRequest) -> int:
    """Expert rows in one tile of launch A: a gated tile is half gate, half up."""
    return 16 if request.gate is None else 8


def cut_up(request: KernelRequest, *, many: bool = False) -> CutUp:
    """The cut of launch A: small blocks, of which a multiprocessor holds several.

    Measured on an H200: 768 tiles want four warps each, from 1024 tiles on and for several tokens a warp a
    tile is best, and 3584 affine tiles want two. Several tokens' affine tiles want blocks of twelve.
    """
    tiles = row_values(request) // rows_a_tile(request)
    affine = request.up.format == "affine"
    if many and affine and request.expert_width // rows_a_tile(request) % 12 == 0:
        return CutUp(teams=12, split=1)
    wanted = 4 if tiles < _MANY_TILES else 2 if affine and tiles >= 2 * _MANY_TILES else 1
    split = min(1 if many else wanted, units(request.up, halves(request)))
    return CutUp(teams=1 if wanted == 4 and not many else max(1, 4 // split), split=split)


def cut_down(request: KernelRequest, *, many: bool = False) -> CutDown:
    """The cut of launch B (measured on an H200): one block a multiprocessor where one unit a warp is all."""
    total = request.top_k * units(request.down, 2)
    total += units(request.shared.expert.down, 2) if request.shared else 0
    affine = request.down.format == "affine"
    tiles, most = 1, 24 if total <= 24 else 12 if affine else 16
    if many:
        tiles, most = 2 if affine and request.down.rows % 32 == 0 else 1, 8
    elif affine and request.down.rows % 32 == 0 and request.down.rows >= 4096:
        tiles, most = 2, 16
    # Equal shares: with one warp fewer, some warp would have a unit more.
    return CutDown(tiles, warps=-(-total // -(-total // most)))


def layout(**vectors: int) -> tuple[dict[str, int], int]:
    """Where each part of shared memory begins, in 16-byte vectors, and the bytes of all."""
    at, begins = 0, {}
    for name, size in vectors.items():
        begins[f"AT_{name}"] = at
        at += size
    return begins, at * _VECTOR


def up_layout(request: KernelRequest, cut: CutUp) -> tuple[dict[str, int], int]:
    """Shared memory of launch A."""
    up = request.up
    groups = -(-up.cols // up.group_size) if up.format == "affine" else 0
    return layout(X=steps(up) * 16 * halves(request), ZEROS=13, SUMS=-(-groups // 4), RED=cut.warps * 4)


def down_layout(cut: CutDown) -> tuple[dict[str, int], int]:
    """Shared memory of launch B."""
    return layout(
        ZEROS=cut.warps * 13,
        RED=cut.warps * cut.tiles * 4,
        RING=cut.warps * _STAGES * 32,
    )


def halves(request: KernelRequest) -> int:
    """Parts that x is split into: a bfloat16 is its own high part."""
    return 1 if request.dtype == "bfloat16" else 2


def act_steps(request: KernelRequest) -> int:
    """Steps of act, each expert's last one filled up."""
    shared = steps(request.shared.expert.down) if request.shared else 0
    return request.top_k * steps(request.down) + shared


def act_words(request: KernelRequest) -> int:
    """Float32 words that launch A leaves for launch B: two parts of every code's input, and the sums."""
    return act_steps(request) * STEP + row_values(request) // 8


def ahead(request: KernelRequest) -> tuple[int, int]:
    """Units of a row that a warp has on their way, in launch A and in launch B."""
    return _ahead(request.up, halves(request), _HELD_UP), _ahead(request.down, 2, _HELD_DOWN)


def _ahead(p: Projection, part_halves: int, held: int) -> int:
    return max(1, held // (unit(p, part_halves) * code_bits(p)))


def codec(p: Projection, part_halves: int, held: int) -> dict[str, object]:
    """Names that a codec and the product need."""
    steps_at_once = unit(p, part_halves)
    return {
        "GROUP_SIZE": p.group_size,
        "BITS": code_bits(p),
        "WIDE": wide(p),
        "UNIT": steps_at_once,
        "SPAN": span(p, part_halves),
        "AHEAD": _ahead(p, part_halves, held),
        "PER_ROW": p.cols // p.group_size if p.group_size else 0,
        "SUMMED": int(p.format == "affine"),
        "SCALE_TYPE": _SCALE_TYPES.get(p.dtype, "float"),
        "IS_HALF": int(p.format == "plain" and p.dtype == "float16"),
    }


def _scales(part: str, p: Projection, shared: bool) -> str:
    """The scales of one unit of a row, as an expression in ``row`` (in scales) and ``group``."""
    if p.format == "plain":
        return "me_scales{}"
    arrays = [f"{pick(part, 's', shared)} + (row)"]
    if p.format == "affine":
        arrays.append(f"{pick(part, 'b', shared)} + (row)")
    return f"me_scales_at<per_row>({', '.join(arrays)}, group)"


def _x_factor(p: Projection) -> str:
    """The power of two that a codec wants x multiplied by, for launch A to multiply act by."""
    return "1.0f" if p.format in ("affine", "plain") else "0x1p64f"


def up_settings(
    experts: ExpertWeights,
    request: KernelRequest,
    cut: CutUp,
    *,
    fragments: bool,
    many: bool = False,
) -> tuple[dict[str, object], int]:
    """The names that ``mma_up.cu`` and its header texts need, and the blocks of a token."""
    up, two = request.up, request.shared is not None
    begins, _ = up_layout(request, cut)
    words = act_words(request) if fragments else row_values(request)
    tiles = [rows // rows_a_tile(request) for rows in (request.expert_width, shared_width(request))]
    blocks, own_blocks = (-(-n // cut.teams) for n in tiles)
    groups = request.top_k * blocks + own_blocks + is_weighed(request)
    low = "up" if request.gate is None else "gate"
    settings = {
        "H": request.input_width,
        "F": request.expert_width,
        "K": request.top_k,
        **codec(up, halves(request), _HELD_UP),
        "DOWN_WIDE": wide(request.down),
        "DOWN_BY": _x_factor(request.down),
        "DOWN_STEPS": act_steps(request),
        "EXPERT_STEPS": steps(request.down),
        "HALVES": halves(request),
        "GATED": int(request.gate is not None),
        "FRAGMENTS": int(fragments),
        "LOW(p)": pick(low, "##p", two),
        "HIGH(p)": pick("up", "##p", two),
        "LOW_SCALES(row, group)": _scales(low, up, two),
        "HIGH_SCALES(row, group)": _scales("up", up, two),
        "END_GATE(v)": "v" if request.gate is None else bias_text("gate", request.gate, "v", "row", two),
        "END_UP(v)": bias_text("up", up, "v", "up_row", two),
        "TEAMS": cut.teams,
        "SPLIT": cut.split,
        **begins,
        **shared_settings(experts, request, words),
        **token_settings(request, words, groups, many),
    }
    return settings, groups


def down_settings(
    experts: ExpertWeights, request: KernelRequest, cut: CutDown, *, many: bool = False
) -> tuple[dict[str, object], int]:
    """The names that ``mma_down.cu`` and its header texts need, and the blocks of a token."""
    down, shared = request.down, request.shared
    begins, _ = down_layout(cut)
    groups = down.rows // (16 * cut.tiles)
    factor = f" * ({{}} * {NVFP4_UNIT!r}f)" if down.global_scale else ""
    own = down if shared is None else shared.expert.down
    settings = {
        "H": down.rows,
        "F": request.expert_width,
        "K": request.top_k,
        **codec(down, 2, _HELD_DOWN),
        "OWN_PER_ROW": own.cols // own.group_size if own.group_size else 0,
        "DOWN_SCALES(row, group)": _scales("down", down, False),
        "OWN_SCALES(row, group)": _scales("shared_down", own, False),
        "BY_GLOBAL": factor.format("down_g[expert]"),
        "SHARE": share_text(request) + (factor.format("shared_down_g[0]") if shared else ""),
        "ADD_BIAS": add_down_bias(request),
        "TILES": cut.tiles,
        "WARPS": cut.warps,
        "STAGES": _STAGES,
        **begins,
        **shared_settings(experts, request, act_words(request)),
        **token_settings(request, act_words(request), groups, many),
    }
    return settings, groups


def product_texts(p: Projection) -> str:
    """The texts of a product, which read the names of its settings."""
    return text("chunk.cu") + text(_CODECS[p.format]) + text("mma.cu")


def codec_texts(p: Projection) -> str:
    """These, behind what they are made of."""
    return text("tensor.cu") + product_texts(p)


def tile_text(name: str) -> str:
    """The text of a launch whose warps take tiles of 16 rows."""
    body = text(name).replace("ME_TILE_ASK\n", text("tile_ask.cu"))
    return body.replace("ME_TILE_SUM\n", text("tile_sum.cu"))


def down_text(ask: str, ready: str) -> str:
    """Launch B's text.

    Args:
        ask: what comes before it asks for its weights.
        ready: what comes before it reads act.
    """
    return text("mma_down.cu").replace("ME_ASK\n", ask).replace("ME_READY\n", ready)


def mma_up(
    backend: Backend,
    experts: ExpertWeights,
    request: KernelRequest,
    cut: CutUp,
    *,
    fragments: bool,
    many: bool = False,
) -> Launch:
    """Launch A. With ``fragments`` its output is what ``mma_down`` reads, else ``act`` as float32.

    Args:
        many: for several tokens, whose number follows from the grid.
    """
    settings, groups = up_settings(experts, request, cut, fragments=fragments, many=many)
    return Launch(
        label="experts_up_mma",
        inputs=("x", "indices", *up_arrays(experts)),
        outputs=("act",),
        header=text(backend.prelude)
        + defines(settings)
        + weigh_text(request)
        + (text("rows.h") if is_weighed(request) else "")
        + codec_texts(request.up)
        + (text("act.cu") if fragments else "")
        + (activation_text(request.activation) or "")
        + bounded(cut.warps),
        source=opening(backend, many) + tile_text("mma_up.cu"),
        groups=groups,
        warps=cut.warps,
        shared=up_layout(request, cut)[1],
    )


def mma_down(
    backend: Backend, experts: ExpertWeights, request: KernelRequest, cut: CutDown, *, many: bool = False
) -> Launch:
    """Launch B on the fragments of ``mma_up``."""
    settings, groups = down_settings(experts, request, cut, many=many)
    settings |= {"ACT(i)": "act[i]"}
    return Launch(
        label="experts_down_mma",
        inputs=("act", "indices", "weights", *down_arrays(experts)),
        outputs=("y",),
        header=text(backend.prelude) + defines(settings) + codec_texts(request.down) + bounded(cut.warps),
        source=opening(backend, many) + down_text("", ""),
        groups=groups,
        warps=cut.warps,
        shared=down_layout(cut)[1],
    )
