"""The two tensor-core launches: which request they take, the names that their texts read, and the texts.

They take every format under 16-bit activations; float32 activations and float32 weights stay with the
warp-per-row launches. ``chunk.cu`` says how the product is laid out, ``form`` in which form, and ``cuts`` how
the work is cut into blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from mlx_experts.engine.kernels.gpu.tiles.cuts import CutDown, CutUp, rows_a_tile
from mlx_experts.engine.kernels.gpu.tiles.form import TileForm, takes, tile_text
from mlx_experts.engine.kernels.request import KernelRequest, Projection

_ACTIVATIONS = ("bfloat16", "float16")


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


def copies_whole(request: KernelRequest) -> bool:
    """Whether the copy engine of sm_90 can bring all of a request's weights."""
    forms = [CutUp(1, 1).form(request), *CutDown(1, 1).forms(request)]
    return all(form.copies_whole for form in forms)


def _scales(part: str, p: Projection, shared: bool) -> str:
    """The scales of one unit of a row, as an expression in ``row`` (in scales) and ``group``."""
    if p.format == "plain":
        return "me_scales{}"
    arrays = [f"{pick(part, 's', shared)} + (row)"]
    if p.format == "affine":
        arrays.append(f"{pick(part, 'b', shared)} + (row)")
    return f"me_scales_at<per_row>({', '.join(arrays)}, group)"


def _near_scales(p: Projection) -> str:
    """As :func:`_scales`, of scales and biases in shared memory."""
    if p.format == "plain":
        return "me_scales{}"
    arrays = ["s + (row)", *(["b + (row)"] if p.format == "affine" else [])]
    return f"me_scales_at<per_row>({', '.join(arrays)}, group)"


def _scales_from(parts: Sequence[str], p: Projection, shared: bool) -> str:
    """The statement that finds scale array ``n`` from row ``row`` on, of parts with equal formats."""
    suffixes = {0: "", 1: "s", 2: "sb"}[TileForm(p, 2).scaled]
    arrays = [pick(part, suffix, shared) for part in parts for suffix in suffixes]
    return " ".join(f"if (n == {n}) from = {a} + row * per_row;" for n, a in enumerate(arrays))


def _x_factor(p: Projection) -> str:
    """The power of two that a codec wants x multiplied by, for launch A to multiply act by."""
    return "1.0f" if p.format in ("affine", "plain") else "0x1p64f"


def up_settings(
    experts: ExpertWeights,
    request: KernelRequest,
    cut: CutUp,
    then: CutDown | None,
    *,
    many: bool = False,
) -> tuple[dict[str, object], int]:
    """The names that ``mma_up.cu`` and its header texts need, and the blocks of a token."""
    up, two = request.up, request.shared is not None
    begins, _ = cut.layout(request)
    pairs = then or CutDown(1, 1)
    down = pairs.form(request)
    fragments = then is not None and not down.digits
    words = pairs.act_words(request) if fragments else row_values(request)
    tiles = [rows // rows_a_tile(request) for rows in (request.expert_width, shared_width(request))]
    blocks, own_blocks = (-(-n // cut.teams) for n in tiles)
    groups = request.top_k * blocks + own_blocks + is_weighed(request)
    low = "up" if request.gate is None else "gate"
    settings = {
        "H": request.input_width,
        "F": request.expert_width,
        "K": request.top_k,
        **cut.settings(request),
        "DOWN_WIDE": down.wide,
        "DOWN_BY": _x_factor(request.down),
        "DOWN_STEPS": pairs.act_steps(request),
        "EXPERT_STEPS": down.steps,
        "GATED": int(request.gate is not None),
        "FRAGMENTS": int(fragments),
        "LOW(p)": pick(low, "##p", two),
        "HIGH(p)": pick("up", "##p", two),
        "LOW_SCALES(row, group)": _scales(low, up, two),
        "HIGH_SCALES(row, group)": _scales("up", up, two),
        "END_GATE(v)": "v" if request.gate is None else bias_text("gate", request.gate, "v", "row", two),
        "END_UP(v)": bias_text("up", up, "v", "up_row", two),
        "SCALES_FROM": _scales_from((low, "up"), up, two),
        "NEAR_SCALES(row, group)": _near_scales(up),
        "TILE_BYTES": cut.tile_bytes(request),
        "APART": cut.form(request).apart(8),
        "FULL_BEGIN": "me_full_begin(full);",
        "PHASE": 0,
        "NEXT_PHASE": "",
        "MEANWHILE": "",
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
    begins, _ = cut.layout(request)
    groups = down.rows // (16 * cut.tiles)
    factor = f" * ({{}} * {NVFP4_UNIT!r}f)" if down.global_scale else ""
    own = down if shared is None else shared.expert.down
    settings = {
        "H": down.rows,
        "F": request.expert_width,
        "K": request.top_k,
        **cut.settings(request),
        "RING": cut.ring(request),
        "OWN_PER_ROW": own.cols // own.group_size if own.group_size else 0,
        "DOWN_SCALES(row, group)": _scales("down", down, False),
        "OWN_SCALES(row, group)": _scales("shared_down", own, False),
        "BY_GLOBAL": factor.format("down_g[expert]"),
        "DOWN(p)": pick("down", "##p", shared is not None),
        "SCALES_FROM": _scales_from(("down",), down, shared is not None).replace("row *", "row0 *"),
        "NEAR_SCALES(row, group)": _near_scales(down),
        "EXPERT_BYTES": cut.expert_bytes(request),
        "APART": cut.form(request).apart(16 * cut.tiles),
        "OWN_APART": (cut.shared_form(request) or cut.form(request)).apart(16 * cut.tiles),
        "FIRST_ASKED": "warp",
        "ASKERS": cut.warps,
        "SHARE": share_text(request) + (factor.format("shared_down_g[0]") if shared else ""),
        "ADD_BIAS": add_down_bias(request),
        "TILES": cut.tiles,
        "WARPS": cut.warps,
        "STAGES": cut.stages,
        **begins,
        **shared_settings(experts, request, cut.act_words(request)),
        **token_settings(request, cut.act_words(request), groups, many),
    }
    return settings, groups


def up_text(request: KernelRequest, cut: CutUp) -> str:
    """Launch A's text."""
    parts = {
        "ME_TILE_ASK": "tile_bulk" if cut.bulk else "tile_ask",
        "ME_TILE_SUM": "tile_sum",
    }
    parts |= {"ME_TILE_X_ASK": "up_{}_ask", "ME_TILE_X": "up_{}"}
    return cut.form(request).body("mma_up", **parts)


def down_text(request: KernelRequest, cut: CutDown, one: str | None = None) -> str:
    """Launch B's text.

    Args:
        one: in one launch with A, what comes before it reads act.
    """
    form = cut.form(request)
    parts = {"ME_DOWN_WEIGHTS": "down_bulk" if cut.bulk else "down_ask"}
    act: tuple[str, ...]
    if one is not None:
        act = (
            "act_awaited",
            "down_digits" if form.digits else "down_pairs_values",
        )
    else:
        act = ("act_values", "down_digits") if form.digits else ("down_pairs",)
    asking = tile_text("down_bulk_ask") + "__syncthreads();\n" if cut.bulk else tile_text("down_first")
    body = form.body("mma_down", **parts).replace("ME_DOWN_ACT\n", tile_text(*act))
    return body.replace("ME_ASK_WEIGHTS\n", asking if one is None else one)


def bulk_text(cut: CutUp | CutDown) -> str:
    """What the copies of rows need."""
    return tile_text("bulk_device") if cut.bulk else ""


def mma_up(
    backend: Backend,
    experts: ExpertWeights,
    request: KernelRequest,
    cut: CutUp,
    then: CutDown | None,
    *,
    many: bool = False,
) -> Launch:
    """Launch A.

    Args:
        then: the launch B that reads its output; for none here the output is ``act`` as float32.
        many: for several tokens, whose number follows from the grid.
    """
    settings, groups = up_settings(experts, request, cut, then, many=many)
    return Launch(
        label="experts_up_mma",
        inputs=("x", "indices", *up_arrays(experts)),
        outputs=("act",),
        header=text(backend.prelude)
        + defines(settings)
        + weigh_text(request)
        + (text("rows.h") if is_weighed(request) else "")
        + tile_text("tensor")
        + bulk_text(cut)
        + cut.form(request).texts
        + (tile_text("act") if settings["FRAGMENTS"] else "")
        + (activation_text(request.activation) or "")
        + bounded(cut.warps),
        source=opening(backend, many) + up_text(request, cut),
        groups=groups,
        warps=cut.warps,
        shared=cut.layout(request)[1],
    )


def mma_down(
    backend: Backend, experts: ExpertWeights, request: KernelRequest, cut: CutDown, *, many: bool = False
) -> Launch:
    """Launch B on what ``mma_up`` leaves for this cut."""
    settings, groups = down_settings(experts, request, cut, many=many)
    return Launch(
        label="experts_down_mma",
        inputs=("act", "indices", "weights", *down_arrays(experts)),
        outputs=("y",),
        header=text(backend.prelude)
        + defines(settings)
        + tile_text("tensor")
        + bulk_text(cut)
        + cut.form(request).texts
        + bounded(cut.warps),
        source=opening(backend, many) + down_text(request, cut),
        groups=groups,
        warps=cut.warps,
        shared=cut.layout(request)[1],
    )
