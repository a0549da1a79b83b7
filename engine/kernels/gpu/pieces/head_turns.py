"""One launch that normalises and rotates the heads of queries, keys and values that other launches left.

For norms that span more than the rows of one block, whose sum no single block of the product sees: over all
heads, or over a latent. A norm of each head fits into the launch of the product (``row_product``).
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlx_experts.engine.kernels.gpu.pieces.packed import Output, output_text, pack
from mlx_experts.engine.kernels.gpu.pieces.piece import Constants, Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, check_heads, turn_text
from mlx_experts.engine.kernels.gpu.source import Backend, Launch, defines, text
from mlx_experts.engine.kernels.request import Decline, Device

_WARPS = 4


def check(rows: Mapping[str, tuple[Heads, int]]) -> Decline | None:
    """Why these rows of heads (with their widths) are left to plain MLX, or None."""
    for heads, width in rows.values():
        objection = check_heads(heads, width)
        if objection is not None:
            return objection
    return None


def build(
    rows: Mapping[str, tuple[Heads, int]],
    backend: Backend,
    device: Device,
    dtype: mx.Dtype,
    *,
    join: bool = False,
) -> Piece:
    """The launch: inputs the rows by name, then ``offset`` and ``inverse`` where heads turn.

    Args:
        rows: what is done to the heads of each row, and the row's width.
        join: as in ``row_product.build``.
    """
    inputs: dict[str, mx.array | None] = dict.fromkeys(rows)
    outputs: dict[str, Output] = {}
    constants, inverse = Constants(join), "inverse"
    turn = next((heads.turn for heads, _ in rows.values() if heads.turn is not None), None)
    if turn is not None:
        inputs |= {"offset": None} | ({"inverse": None} if turn.inverse is None else {})
        inverse = inverse if turn.inverse is None else constants.add(turn.inverse)
    chain, begin, threads = [], 0, _WARPS * 32
    for name, (heads, width) in rows.items():
        d, norm, given = heads.width, heads.norm, "1.0f"
        weight = constants.add(norm.weight) if norm is not None and norm.weight is not None else ""
        at, end = f"(group - {begin}) * {d}", begin + width // d
        body = f"for (int i = tid; i < {d}; i += {threads}) ys[i] = me_value({name}[{at} + i]);\n"
        if heads.whole and norm is not None:
            assert not heads.late
            body += f"const float all = me_row_squares<{width}, {threads}>({name}, red, warp, lane);\n"
            given = f"me_rsqrt(all / {float(width)!r}f + {float(norm.eps)!r}f)"
            weight = f"{weight} + {at}" if weight else weight
        call = turn_text(heads, weight, inverse, f"out_{name} + {at}", given, threads)
        chain.append(f"if (group < {end}) {{\n{body}me_barrier();\n{call}\n}}")
        outputs[f"out_{name}"] = Output((1, width // d, 1, d), dtype)
        begin = end
    inputs |= constants.inputs()
    packed = pack(outputs, device)
    written, places = output_text(outputs, packed)
    settings = defines({"D": max(heads.width for heads, _ in rows.values()), "WARPS": _WARPS})
    launch = Launch(
        label="head_turns",
        inputs=tuple(inputs),
        outputs=written,
        header=text(backend.prelude) + settings + text("pieces/all_heads.h") + text("pieces/turn.h"),
        source=backend.opening
        + places
        + text("pieces/heads.h").replace("ME_HEADS\n", " else ".join(chain) + "\n"),
        groups=begin,
        warps=_WARPS,
    )
    return Piece(backend, launch, inputs, outputs, packed)
