"""The tensor-core form of a row product for CUDA: what it takes, when it is chosen, and how it is cut.

It is the experts' first launch for one "expert" (``chunk.cu``), with x as two bfloat16 parts, so that the row
that the matrices meet keeps 16 bits of its float32 values. Tiles are of 16 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.source import text
from mlx_experts.engine.kernels.gpu.tiles.cuts import layout as layout_of
from mlx_experts.engine.kernels.gpu.tiles.form import TileForm, tile_text
from mlx_experts.engine.kernels.gpu.tiles.form import takes as takes_tiles
from mlx_experts.engine.kernels.request import Projection

TILE = 16
# Bytes of matrices from which on this form is chosen. Below, a warp a row has as little to wait for.
_LEAST_BYTES = 1 << 20
# With fewer tiles than this, of rows up to this width, a warp a row was as fast or faster.
_FEW, _NARROW = 160, 4096
# Bytes of memory that a block may have on any device.
_ROOM = 99 * 1024
# Warps that an H200 should hold: 132 multiprocessors with 16 warps of 128 registers a thread each.
_MULTIPROCESSORS, _RESIDENT = 132, 16
# Words of a row that a lane has on their way.
_WORDS = 24
# Numbers of tiles at which other cuts were faster: blocks of several tiles read longer stretches of memory,
# and the more tiles there are, the fewer words a warp need have on their way.
_SOME, _FULL, _MANY = 320, 1024, 4096


@dataclass(frozen=True)
class TensorCut:
    """How the rows are shared out.

    Args:
        tiles: of 16 rows, in a group.
        split: warps a tile, which share out its steps.
        words: of one row that a lane has on their way.
        resident: warps that a multiprocessor should hold, which bounds the registers of a thread.
    """

    tiles: int
    split: int
    words: int = _WORDS
    resident: int = _RESIDENT

    @property
    def rows(self) -> int:
        """Rows a tile."""
        return TILE

    @property
    def warps(self) -> int:
        """Warps a group."""
        return self.tiles * self.split

    @property
    def unit(self) -> int:
        """Rows a group."""
        return TILE * self.tiles

    @property
    def blocks(self) -> int:
        """Groups that a multiprocessor should hold."""
        return max(1, self.resident // self.warps)


@dataclass(frozen=True)
class Matrices:
    """What the form and the cut depend on.

    Args:
        projections: of every matrix; they have one width.
        dtype: of the row and the outputs.
        exact: whether the row that the matrices meet is the one that is read.
        head: width of the heads that are normalised and turned, or None.
    """

    projections: Sequence[Projection]
    dtype: mx.Dtype
    exact: bool
    head: int | None

    @property
    def halves(self) -> int:
        """Parts of x: a bfloat16 row as it is read is its own high part."""
        return 1 if self.exact and self.dtype == mx.bfloat16 else 2

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return sum(-(-p.rows // TILE) for p in self.projections)

    @property
    def bytes(self) -> int:
        """Of all weights, without scales."""
        return sum(p.rows * p.cols * p.bits // 8 for p in self.projections)


def takes(asked: Matrices) -> bool:
    """Whether the form computes this product: matrices of one format, and a row of 16 bits that fits."""
    kinds = {(p.format, p.bits, p.group_size, p.dtype) for p in asked.projections}
    p = asked.projections[0]
    whole = asked.head is None or asked.head % TILE == 0
    if asked.dtype not in (mx.bfloat16, mx.float16) or len(kinds) > 1 or not takes_tiles(p) or not whole:
        return False
    return layout(asked, cut(asked))[1] <= _ROOM and cut(asked).warps <= 32


def chosen(asked: Matrices) -> TensorCut | None:
    """The cut where this form is the faster one, else None: float32, small or mixed matrices, old devices."""
    if not takes(asked) or asked.bytes < _LEAST_BYTES or not _has_tensor_cores():
        return None
    small = asked.tiles < _FEW and asked.projections[0].cols <= _NARROW
    return None if small and asked.head is None else cut(asked)


def _has_tensor_cores() -> bool:
    # Text may be made where there is no device.
    return not mx.cuda.is_available() or cuda.capability() is not None


def cut(asked: Matrices) -> TensorCut:
    """A group a head where heads are turned, else tiles and warps by how many tiles there are.

    Measured on an H200 for 22 shapes (docs/benchmarks-h200.md).
    """
    form = _form(asked)
    most, words, tiles = form.units, _words(form), asked.tiles
    if asked.head is not None:
        tiles = asked.head // TILE
        return TensorCut(
            tiles, _power(min(most, max(1, _RESIDENT // tiles))), words if tiles < 8 else min(words, 16)
        )
    if tiles >= _MANY:
        return TensorCut(8, 1, 8, 24)
    if tiles >= _FULL:
        return TensorCut(4, _power(min(most, 2)), min(words, 16))
    if tiles >= _SOME:
        return TensorCut(4, _power(min(most, 4)), words)
    return TensorCut(1, _power(min(most, 16, max(1, _MULTIPROCESSORS * _RESIDENT // tiles))), words)


def _form(asked: Matrices) -> TileForm:
    return TileForm(asked.projections[0], asked.halves)


def _words(form: TileForm) -> int:
    """As many as 128 registers a thread have room for: affine scales and biases of three units at most."""
    affine = form.projection.format == "affine"
    return min(_WORDS, 3 * form.unit * form.code_bits) if affine else _WORDS


def _power(most: int) -> int:
    """The largest power of two up to a number."""
    return 1 << most.bit_length() - 1


def layout(asked: Matrices, how: TensorCut) -> tuple[dict[str, int], int]:
    """Where each part of shared memory begins, in 16-byte vectors, and the bytes of all."""
    form = _form(asked)
    return layout_of(
        X=form.vectors,
        ZEROS=13,
        SUMS=-(-form.group_words // 4),
        RED=how.warps * 4,
        NORMS=-(-how.warps // 4),
    )


def settings(asked: Matrices, how: TensorCut) -> dict[str, object]:
    """Names that the body and the codec need."""
    p = asked.projections[0]
    arrays = {"affine": "matrix_scales + (row), matrix_biases + (row)", "plain": ""}
    scales = arrays.get(p.format, "matrix_scales + (row)")
    return {
        **_form(asked).settings(how.words),
        **layout(asked, how)[0],
        "TEAMS": how.tiles,
        "SPLIT": how.split,
        # Vectors of the row that a thread asks for before the weights: 12 to 16 registers each.
        "EARLY": 1 if how.words > 16 else 2,
        "LOW_SCALES(row, group)": f"me_scales_at<per_row>({scales}, group)" if scales else "me_scales{}",
        "HIGH_SCALES(row, group)": "ME_LOW_SCALES(row, group)",
    }


def matrix_text(weight: str, scales: str, biases: str, group: str, rows: int) -> str:
    """The statements by which a block finds its matrix; ``group`` is its number within the matrix."""
    kind = "const ME_SCALE_TYPE*"
    return (
        f"matrix = {weight}; matrix_scales = ({kind})({scales}); matrix_biases = ({kind})({biases});"
        f" last = {rows - 1}; row0 = {group} * ME_TEAMS * ME_ROWS;"
    )


def header(asked: Matrices) -> str:
    """The text that the body calls."""
    return tile_text("tensor") + _form(asked).texts


def body(matrices: str) -> str:
    """The product; ``matrices`` is the chain of ``matrix_text``."""
    made = text("pieces/product_mma.cu")
    for line, name in (("ME_TILE_ASK", "tile_ask"), ("ME_TILE_SUM", "tile_sum")):
        made = made.replace(f"{line}\n", tile_text(name))
    return made.replace("ME_MATRIX\n", matrices)
