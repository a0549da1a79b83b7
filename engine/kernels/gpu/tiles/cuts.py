"""How the tensor-core launches are cut into blocks, and the shared memory of a block.

What is chosen for which request was measured on an H200 (docs/benchmarks-h200.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_experts.engine.kernels.gpu.source import row_values
from mlx_experts.engine.kernels.gpu.tiles.form import STEP, TileForm
from mlx_experts.engine.kernels.request import KernelRequest

_VECTOR = 16
# From this many tiles on, the tiles themselves fill the device.
_MANY_TILES = 1024
# Steps of act that a warp of launch B has on their way.
_STAGES = 4
# Words of one row that a lane has on their way in launch A and in launch B.
_HELD_UP, _HELD_DOWN = 16, 8
# Up to this width, several tokens' affine weights of 8 bits are the faster as digits in launch A.
_DIGITS_WIDTH = 4096


def layout(**vectors: int) -> tuple[dict[str, int], int]:
    """Where each part of shared memory begins, in 16-byte vectors, and the bytes of all."""
    at, begins = 0, {}
    for name, size in vectors.items():
        begins[f"AT_{name}"] = at
        at += size
    return begins, at * _VECTOR


def rows_a_tile(request: KernelRequest) -> int:
    """Expert rows in one tile of launch A: a gated tile is half gate, half up."""
    return 16 if request.gate is None else 8


@dataclass(frozen=True)
class CutUp:
    """How launch A is cut.

    Args:
        teams: tiles in a block.
        split: warps a tile, which share out its units.
        digits: whether codes that can be are multiplied as bytes.
        bulk: whether the copy engine brings a block's weights to shared memory.
    """

    teams: int
    split: int
    digits: bool = False
    bulk: bool = False

    @property
    def warps(self) -> int:
        """Warps a block."""
        return self.teams * self.split

    def form(self, request: KernelRequest) -> TileForm:
        """How its weights are multiplied: a bfloat16 input is its own only part."""
        parts = 1 if request.dtype == "bfloat16" else 2
        return TileForm.of(request.up, parts, digits=self.digits)

    def settings(self, request: KernelRequest) -> dict[str, object]:
        """Names that the texts of its form need."""
        return self.form(request).settings(_HELD_UP)

    def tile_bytes(self, request: KernelRequest) -> int:
        """Bytes of shared memory for a tile's codes and scales."""
        form = self.form(request)
        return 4 * form.apart(8) + form.scaled * form.scale_bytes(16)

    def layout(self, request: KernelRequest) -> tuple[dict[str, int], int]:
        """Where each part of its shared memory begins, and the bytes of all."""
        form = self.form(request)
        parts = dict(X=form.vectors, ZEROS=13, SUMS=-(-form.group_words // 4), RED=self.warps * 4)
        if self.bulk:
            tiles = self.teams * self.tile_bytes(request) // _VECTOR
            parts |= dict(FULL=-(-self.teams // 2), TILES=tiles)
        return layout(**parts)


@dataclass(frozen=True)
class CutDown:
    """How launch B is cut.

    Args:
        tiles: tiles in a block.
        warps: warps a block, which share out the units of all experts.
        digits: whether codes that can be are multiplied as bytes.
        bulk: whether the copy engine brings a block's weights to shared memory.
    """

    tiles: int
    warps: int
    digits: bool = False
    bulk: bool = False

    def form(self, request: KernelRequest) -> TileForm:
        """How its weights are multiplied: act is float32, which two parts hold."""
        return TileForm.of(request.down, 2, digits=self.digits)

    def shared_form(self, request: KernelRequest) -> TileForm | None:
        """The same for the shared expert's."""
        shared = request.shared
        return TileForm.of(shared.expert.down, 2, digits=self.digits) if shared else None

    def forms(self, request: KernelRequest) -> list[TileForm]:
        """Those of both."""
        shared = self.shared_form(request)
        return [self.form(request), *([shared] if shared else [])]

    def settings(self, request: KernelRequest) -> dict[str, object]:
        """Names that the texts of its form need."""
        return self.form(request).settings(_HELD_DOWN)

    def units(self, request: KernelRequest) -> int:
        """Units of all experts."""
        routed, *shared = self.forms(request)
        return request.top_k * routed.units + sum(form.units for form in shared)

    def act_steps(self, request: KernelRequest) -> int:
        """Steps of act as fragments, each expert's last one filled up."""
        routed, *shared = self.forms(request)
        return request.top_k * routed.steps + sum(form.steps for form in shared)

    def act_words(self, request: KernelRequest) -> int:
        """Float32 words that launch A leaves for it.

        For digits they are the values. For pairs they are two parts of every code's input, and the sums.
        """
        values = row_values(request)
        return values if self.form(request).digits else self.act_steps(request) * STEP + values // 8

    @property
    def stages(self) -> int:
        """Steps of act that a warp has on their way as fragments."""
        return _STAGES // 2 if self.bulk else _STAGES

    def ring(self, request: KernelRequest) -> int:
        """Vectors of shared memory for what a warp works on: steps of fragments, or a unit's digits."""
        form = self.form(request)
        return form.unit * 16 + 4 if form.digits else self.stages * 32

    def expert_bytes(self, request: KernelRequest) -> int:
        """Bytes of shared memory for a block's part of one expert."""
        rows = 16 * self.tiles
        return max(2 * f.apart(rows) + f.scaled * f.scale_bytes(rows) for f in self.forms(request))

    def layout(self, request: KernelRequest) -> tuple[dict[str, int], int]:
        """Where each part of its shared memory begins, and the bytes of all."""
        parts = dict(
            ZEROS=self.warps * 13,
            RED=self.warps * self.tiles * 4,
            RING=self.warps * self.ring(request),
        )
        if self.bulk:
            experts = request.top_k + (request.shared is not None)
            room = experts * self.expert_bytes(request) // _VECTOR
            parts |= dict(FULL=-(-experts // 2), EXPERTS=room)
        return layout(**parts)


def cut_up(request: KernelRequest, *, many: bool = False) -> CutUp:
    """The cut of launch A: small blocks, of which a multiprocessor holds several.

    768 tiles want four warps each, from 1024 tiles on and for several tokens a warp a tile is best, and 3584
    affine tiles want two. Several tokens' affine tiles want blocks of twelve. Every block makes x to digits,
    which pays for 8 bits alone: their codes are two each in pairs.
    """
    tiles = row_values(request) // rows_a_tile(request)
    affine = request.up.format == "affine"
    digits = affine and request.up.bits == 8 and (not many or request.expert_width <= _DIGITS_WIDTH)
    if many and affine and request.expert_width // rows_a_tile(request) % 12 == 0:
        return CutUp(teams=12, split=1, digits=digits)
    wanted = 4 if tiles < _MANY_TILES else 2 if affine and tiles >= 2 * _MANY_TILES else 1
    split = min(1 if many else wanted, CutUp(1, 1, digits).form(request).units)
    return CutUp(1 if wanted == 4 and not many else max(1, 4 // split), split, digits)


def cut_down(request: KernelRequest, *, many: bool = False) -> CutDown:
    """The cut of launch B: one block a multiprocessor where one unit a warp is all.

    One token's 4 bits in groups of 32 or 128 are as fast or faster in pairs.
    """
    down, affine = request.down, request.down.format == "affine"
    digits = many or down.bits == 8 or down.group_size == 64
    total = CutDown(1, 1, digits).units(request)
    tiles, most = 1, 24 if total <= 24 else 12 if affine else 16
    if many:
        tiles, most = 2 if affine and down.rows % 32 == 0 else 1, 8
    elif affine and down.rows % 32 == 0 and down.rows >= 4096:
        tiles, most = 2, 16
    # Equal shares: with one warp fewer, some warp would have a unit more.
    return CutDown(tiles, -(-total // -(-total // most)), digits)
