"""Launches A and B as one, for one token's experts that are small beside the device.

A launch costs the host several microseconds, which is what a token of small experts waits for; the GPU itself
is a little slower so. Every block computes its part of ``act``, asks for its part of the down weights, and
waits until all of ``act`` is there. Blocks mark what they have done in words that the launch before leaves at
zero. One that has waited long computes what nobody has marked: so none waits for a block that does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import ExpertWeights
from mlx_experts.engine.kernels.gpu import mma
from mlx_experts.engine.kernels.gpu.mma import CutDown, CutUp
from mlx_experts.engine.kernels.gpu.pieces.packed import Output, Packed, output_text, pack
from mlx_experts.engine.kernels.gpu.source import (
    WARP,
    Backend,
    Launch,
    activation_text,
    bounded,
    defines,
    down_arrays,
    is_weighed,
    opening,
    pitch,
    shared_width,
    text,
    up_arrays,
    weigh_text,
)
from mlx_experts.engine.kernels.request import KernelRequest

# Looks at the marks, a microsecond each, before a block does another's work.
_PATIENCE = 64
# Marks of all items are read by one warp.
_MOST_ITEMS = WARP * 32
# One round in each part: two launches have more on their way where there are more.
_MOST_ROUNDS = 2
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
        return CutUp(self.warps // self.split, self.split)

    @property
    def down(self) -> CutDown:
        """The second part's."""
        return CutDown(self.tiles, self.warps)

    def items(self, request: KernelRequest) -> int:
        """Blocks of the first part."""
        tiles = (rows // mma.rows_a_tile(request) for rows in (request.expert_width, shared_width(request)))
        blocks, own = (-(-n // self.up.teams) for n in tiles)
        return request.top_k * blocks + own + is_weighed(request)

    def down_blocks(self, request: KernelRequest) -> int:
        """Blocks of the second part."""
        return request.down.rows // (16 * self.tiles)

    def blocks(self, request: KernelRequest) -> int:
        """Blocks of the launch."""
        return max(self.items(request), self.down_blocks(request))

    def rounds(self, request: KernelRequest) -> int:
        """How often a warp waits for weights, in both parts: it has several units on their way at once."""
        down = request.top_k * mma.units(request.down, 2)
        down += mma.units(request.shared.expert.down, 2) if request.shared else 0
        up = mma.units(request.up, mma.halves(request))
        ahead_up, ahead_down = mma.ahead(request)
        return ceil(up / (self.split * ahead_up)) + self.tiles * ceil(down / (self.warps * ahead_down))

    def room(self, request: KernelRequest) -> int:
        """Bytes of shared memory."""
        return mma.up_layout(request, self.up)[1] + mma.down_layout(self.down)[1]


@dataclass(frozen=True)
class One:
    """A request and how its launch is cut."""

    request: KernelRequest
    cut: CutOne

    @property
    def marks(self) -> int:
        """Words of zero that the launch needs for its marks."""
        return -(-self.cut.items(self.request) // 32)

    def outputs(self, dtype: mx.Dtype) -> tuple[dict[str, Output], Packed]:
        """``y`` and what lies between the two parts, in one array."""
        request = self.request
        made = {
            "y": Output.row(request.down.rows, dtype),
            "act": Output.row(pitch(mma.act_words(request), request), mx.float32),
        }
        packed = pack(made, "cuda")
        assert packed is not None
        return made, packed


def plan(request: KernelRequest, multiprocessors: int, room: int) -> One | None:
    """The cut for a device, or None where the experts are too large for it, or have no tensor-core form.

    Args:
        room: bytes of shared memory that a block may have.
    """
    if not mma.takes_down(request):
        return None
    tiles = (1, 2) if request.down.rows % 32 == 0 else (1,)
    cuts = (CutOne(w, s, t) for w in _WARPS for s in _SPLITS for t in tiles if w % s == 0)
    fit = [c for c in cuts if c.blocks(request) <= min(multiprocessors, _MOST_ITEMS)]
    fit = [c for c in fit if c.room(request) <= room and c.rounds(request) <= _MOST_ROUNDS]
    best = min(fit, key=lambda c: (c.rounds(request), c.warps), default=None)
    return None if best is None else One(request, best)


def build(backend: Backend, experts: ExpertWeights, one: One, dtype: mx.Dtype) -> Launch:
    """The launch: inputs ``x, indices, weights, state`` and the arrays; output ``out`` of ``One.outputs``."""
    request, cut = one.request, one.cut
    up, _ = mma.up_settings(experts, request, cut.up, fragments=True)
    down, _ = mma.down_settings(experts, request, cut.down)
    # The second part's shared memory follows the first part's.
    behind = mma.up_layout(request, cut.up)[1] // 16
    down |= {name: at + behind for name, at in mma.down_layout(cut.down)[0].items()}
    down |= {"ACT(i)": "me_fresh(act + (i))", "ITEMS": cut.items(request)}
    down |= {"DOWN_BLOCKS": cut.down_blocks(request)}
    if is_weighed(request):
        down["SHARE"] = str(down["SHARE"]).replace("act[ME_WEIGH_AT]", "me_fresh(act + ME_WEIGH_AT)")
    weigh = (weigh_text(request) + text("rows.h")) if is_weighed(request) else ""
    header = text(backend.prelude) + text("tensor.cu") + text("one_device.cu")
    header += f"#define ME_PATIENCE {_PATIENCE}\n" + text("one_next.cu")
    header += activation_text(request.activation) or ""
    header += _apart("me_up", up, weigh + mma.product_texts(request.up) + text("act.cu"))
    header += _apart("me_down", down, mma.product_texts(request.down)) + bounded(cut.warps)
    made, packed = one.outputs(dtype)
    written, places = output_text(made, packed)
    source = opening(backend, False) + places + defines(up)
    source += (
        "auto up_item = [&](const int group) {\nusing namespace me_up;\n"
        + mma.tile_text("mma_up.cu")
        + "};\n"
    )
    source += _undefined(up) + defines(down) + "using namespace me_down;\n"
    source += mma.down_text(text("one_ask.cu"), text("one_ready.cu"))
    return Launch(
        label="experts_mma",
        inputs=("x", "indices", "weights", "state", *(up_arrays(experts) | down_arrays(experts))),
        outputs=written,
        header=header,
        source=source,
        groups=cut.blocks(request),
        warps=cut.warps,
        shared=cut.room(request),
    )


def _apart(name: str, settings: Mapping[str, object], body: str) -> str:
    """Texts under settings of their own, in a namespace."""
    return f"{defines(settings)}namespace {name} {{\n{body}}}\n{_undefined(settings)}"


def _undefined(names: Iterable[str]) -> str:
    return "".join(f"#undef ME_{name.partition('(')[0]}\n" for name in names)
