"""One launch for each head's part of a token's row times a matrix of its own.

Latent attention takes queries into the latent's space and values out of it so. Sums are float32 and every
output is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import Stack
from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.pieces.packed import Output, output_text, pack
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece, bounded
from mlx_experts.engine.kernels.gpu.source import (
    Backend,
    Launch,
    array_names,
    chunk_width,
    defines,
    format_number,
    text,
)
from mlx_experts.engine.kernels.request import Decline, Device

# Blocks that fill an H200, as in `row_product`.
_ENOUGH_GROUPS = 120
_WIDEST = 4096


@dataclass(frozen=True, eq=False)
class HeadProduct:
    """The launch in full.

    Args:
        stack: ``[h, rows, width]``, without a bias.
        pitch: values of the row from one head's part to the next one's, which begins with ``width`` of them.
    """

    stack: Stack
    pitch: int

    @property
    def heads(self) -> int:
        """H."""
        return int(self.stack.weight.shape[0])


@dataclass(frozen=True)
class Cut:
    """``lanes`` share a row of a matrix; a warp takes ``passes`` times as many rows as it has such shares."""

    lanes: int
    passes: int
    warps: int

    @property
    def unit(self) -> int:
        """Rows a group."""
        return 32 // self.lanes * self.passes * self.warps


def cut(asked: HeadProduct) -> Cut | None:
    """The largest units that divide a head's rows and leave enough groups; None where none divides them."""
    p = asked.stack.projection
    chunks = p.cols // chunk_width(p)
    lanes = min(32, 1 << (chunks.bit_length() - 1))
    cuts = [Cut(lanes, passes, warps) for warps in (8, 4, 2, 1) for passes in (4, 2, 1)]
    cuts = [each for each in cuts if p.rows % each.unit == 0]
    enough = (c for c in cuts if asked.heads * p.rows // c.unit >= _ENOUGH_GROUPS)
    return next(enough, cuts[-1] if cuts else None)


def check(asked: HeadProduct) -> Decline | None:
    """Why the kernel leaves this to plain MLX, or None when it takes it."""
    p = asked.stack.projection
    chunk = chunk_width(p)
    if p.cols % chunk or p.cols > _WIDEST:
        return Decline("width", f"a multiple of {chunk} up to {_WIDEST}", str(p.cols), "Nothing.")
    if p.bias or p.global_scale:
        return Decline("matrix", "one without bias and scale of its own", "one with", "Nothing.")
    if cut(asked) is None:
        return Decline("rows", "a multiple of a warp's rows", str(p.rows), "Nothing.")
    return None


def build(
    asked: HeadProduct,
    backend: Backend,
    device: Device,
    dtype: mx.Dtype,
    *,
    joined: Sequence[Joined] = (),
    how: Cut | None = None,
) -> Piece:
    """The launch as a function of ``x``, whose values are ``h`` parts, to ``y`` ``[1, h, 1, rows]``.

    Args:
        joined: as in ``row_product.build``.
        how: another cut than the default (for tests).
    """
    p, how = asked.stack.projection, how or cut(asked)
    assert how is not None
    inputs: dict[str, mx.array | None] = {"x": None, **array_names("p0", asked.stack)}
    outputs = {"y": Output((1, asked.heads, 1, p.rows), dtype)}
    packed = pack(outputs, device)
    scales = "p0_s" if p.group_size else "(ME_DEVICE const uint8_t*)0"
    settings = {
        "H": p.cols,
        "BITS": p.bits,
        "GROUP_SIZE": p.group_size,
        "FORMAT": format_number(p),
        "CHUNK": chunk_width(p),
        "LANES": how.lanes,
        "PASSES": how.passes,
        "WARPS": how.warps,
        "GROUPS": p.rows // how.unit,
        "PITCH": asked.pitch,
        "W": "(ME_DEVICE const me_uint*)p0_w",
        "S": scales,
        "B": "p0_b" if p.format == "affine" else scales,
    }
    written, places = output_text(outputs, packed)
    launch = Launch(
        label="head_product",
        inputs=tuple(inputs),
        outputs=written,
        header=text(backend.prelude) + defines(settings) + text("rows.h") + bounded(device, how.warps),
        source=backend.opening + places + text("pieces/each_head.h"),
        groups=asked.heads * p.rows // how.unit,
        warps=how.warps,
    )
    return Piece(backend, launch, inputs, outputs, packed).reading(joined)
