"""Launches A and B as one, for one token's experts that are small beside the device.

A launch costs the host several microseconds, and the GPU one or two. Every block asks for its part of all
weights, which the copy engine brings to shared memory, computes its part of ``act``, and waits until all of
``act`` is there, in words that the launch before leaves as no value has them. One that has waited long
computes what is missing: so none waits for a block that does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from mlx_experts.engine.kernels.expert_weights import ExpertWeights
from mlx_experts.engine.kernels.gpu.source import (
    Backend,
    Launch,
    activation_text,
    bounded,
    defines,
    down_arrays,
    is_weighed,
    opening,
    pitch,
    row_values,
    shared_width,
    text,
    up_arrays,
    weigh_text,
)
from mlx_experts.engine.kernels.gpu.tiles import two_launches
from mlx_experts.engine.kernels.gpu.tiles.cuts import CutDown, CutUp, rows_a_tile
from mlx_experts.engine.kernels.gpu.tiles.form import tile_text
from mlx_experts.engine.kernels.request import KernelRequest

# A word of ``state`` before a block has left a value there, and looks before a block does another's work.
NOTHING, _PATIENCE = "0xFFFFFFFFu", 64
# Bytes of shared memory that the text itself has, for what a warp says to its block.
_SAID = 16
# More warps leave a thread fewer registers than both parts need.
_WARPS = range(8, 25, 2)
_SPLITS = (4, 2, 1)


@dataclass(frozen=True)
class CutOne:
    """How the launch is cut: both parts by the warps of one block.

    Args:
        warps: of a block.
        split: warps a tile of the first part.
        tiles: of 16 outputs, of a block's second part.
    """

    warps: int
    split: int
    tiles: int

    @property
    def up(self) -> CutUp:
        """The first part's."""
        return CutUp(self.warps // self.split, self.split, digits=True, bulk=True)

    @property
    def down(self) -> CutDown:
        """The second part's."""
        return CutDown(self.tiles, self.warps, digits=True, bulk=True)

    def items(self, request: KernelRequest) -> int:
        """Blocks of the first part."""
        tiles = (rows // rows_a_tile(request) for rows in (request.expert_width, shared_width(request)))
        blocks, own = (-(-n // self.up.teams) for n in tiles)
        return request.top_k * blocks + own + is_weighed(request)

    def down_blocks(self, request: KernelRequest) -> int:
        """Blocks of the second part."""
        return request.down.rows // (16 * self.tiles)

    def blocks(self, request: KernelRequest) -> int:
        """Blocks of the launch."""
        return max(self.items(request), self.down_blocks(request))

    def rounds(self, request: KernelRequest) -> int:
        """Units that a warp works on, one after another, in both parts."""
        up, down = self.up.form(request).units, self.down.units(request)
        return ceil(up / self.split) + self.tiles * ceil(down / self.warps)

    def room(self, request: KernelRequest) -> int:
        """Bytes of shared memory that the launch asks for."""
        return self.up.layout(request)[1] + self.down.layout(request)[1]


@dataclass(frozen=True)
class One:
    """A request and how its launch is cut."""

    request: KernelRequest
    cut: CutOne

    @property
    def words(self) -> int:
        """Words of the input ``state``, where blocks leave ``act``: all ones, and new for every call."""
        return pitch(row_values(self.request), self.request)


def plan(request: KernelRequest, multiprocessors: int, room: int) -> One | None:
    """The cut for a device, or None where the experts are too large for it, or have no tensor-core form.

    Args:
        room: bytes of shared memory that a block may have.
    """
    if not two_launches.takes_down(request) or not two_launches.copies_whole(request):
        return None
    tiles = (1, 2) if request.down.rows % 32 == 0 else (1,)
    cuts = (CutOne(w, s, t) for w in _WARPS for s in _SPLITS for t in tiles if w % s == 0)
    fit = [c for c in cuts if c.blocks(request) <= multiprocessors]
    fit = [c for c in fit if c.room(request) + _SAID <= room]
    best = min(fit, key=lambda c: (c.rounds(request), c.warps), default=None)
    return None if best is None else One(request, best)


def build(backend: Backend, experts: ExpertWeights, one: One) -> Launch:
    """The launch: inputs ``x, indices, weights, state`` and the arrays; output ``y`` ``[H]``."""
    request, cut = one.request, one.cut
    up, _ = two_launches.up_settings(experts, request, cut.up, None)
    down, _ = two_launches.down_settings(experts, request, cut.down)
    # The second part's shared memory follows the first part's.
    behind = cut.up.layout(request)[1] // 16
    down |= {name: at + behind for name, at in cut.down.layout(request)[0].items()}
    left = {"LEAVE(i, v)": "me_leave(act + (i), v)", "WEIGH_AT": row_values(request)}
    rows, warps = cut.up.teams * rows_a_tile(request), cut.warps
    up |= left
    down |= left | {"ITEMS": cut.items(request), "DOWN_BLOCKS": cut.down_blocks(request), "ITEM_ROWS": rows}
    down["FIRST_ASKED"] = f"{warps - 1} - warp"
    down["ROUTED_ITEMS"] = request.top_k * -(-request.expert_width // rows)
    if is_weighed(request):
        for name in ("SHARE", "ADD_BIAS"):
            down[name] = str(down[name]).replace("act[ME_WEIGH_AT]", "me_fresh(act + ME_WEIGH_AT)")
    weigh = (weigh_text(request) + text("rows.h")) if is_weighed(request) else ""
    header = text(backend.prelude) + tile_text("tensor") + tile_text("bulk_device") + tile_text("one_device")
    header += f"#define ME_PATIENCE {_PATIENCE}\n#define ME_NOTHING {NOTHING}\n" + tile_text("one_leave")
    header += activation_text(request.activation) or ""
    header += _apart("me_up", up, weigh + cut.up.form(request).texts)
    header += _apart("me_down", down, cut.down.form(request).texts) + bounded(warps)
    up |= {"FULL_BEGIN": "if (!begun) me_full_begin(full);", "PHASE": "phase"}
    up |= {"NEXT_PHASE": "begun = true; phase ^= 1;", "MEANWHILE": "if (!asked) ask_down();"}
    source = opening(backend, False) + tile_text("one_open")
    source += defines(down) + f"auto ask_down = [&] {{\n{tile_text('one_down', 'down_bulk_ask')}}};\n"
    source += _undefined(down) + defines(up)
    item = two_launches.up_text(request, cut.up)
    source += f"auto up_item = [&](const int group) {{\nusing namespace me_up;\n{item}}};\n"
    source += _undefined(up) + defines(down) + "using namespace me_down;\n"
    source += two_launches.down_text(request, cut.down, tile_text("one_ask"))
    return Launch(
        label="experts_mma",
        inputs=("x", "indices", "weights", "state", *(up_arrays(experts) | down_arrays(experts))),
        outputs=("y",),
        header=header,
        source=source,
        groups=cut.blocks(request),
        warps=warps,
        shared=cut.room(request),
    )


def _apart(name: str, settings: Mapping[str, object], body: str) -> str:
    """Texts under settings of their own, in a namespace."""
    return f"{defines(settings)}namespace {name} {{\n{body}}}\n{_undefined(settings)}"


def _undefined(names: Iterable[str]) -> str:
    return "".join(f"#undef ME_{name.partition('(')[0]}\n" for name in names)
