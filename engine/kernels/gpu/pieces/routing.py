"""Norm, router matrix and selection in one launch on CUDA, where the last block to finish selects.

Metal orders what a launch writes only within a thread group, so the selection takes a second launch there.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import Stack
from mlx_experts.engine.kernels.gpu.joined import Joined
from mlx_experts.engine.kernels.gpu.pieces import row_product
from mlx_experts.engine.kernels.gpu.pieces.packed import Output
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Norm, Product, RowProduct, Text
from mlx_experts.engine.kernels.gpu.source import WARP, Backend, text
from mlx_experts.engine.kernels.gpu.tiles.one_launch import NOTHING
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.kernels.router_kernel import RouterSteps, router_settings
from mlx_experts.engine.kernels.router_kernel import check as check_steps

_COUNTER_WORDS = 4
# What a launch adds to its text so that the routing launch after it finds its counter at zero.
ZEROS = Text(
    outputs={"cleared": Output.row(_COUNTER_WORDS, mx.uint32)},
    tail=f"if (group == 0 && warp == 0 && lane < {_COUNTER_WORDS}) cleared[lane] = 0u;\n",
)


def check(matrix: Stack, norm: Norm | None, steps: RouterSteps) -> Decline | None:
    """Why the kernel leaves this router to plain MLX, or None."""
    objection = check_steps(steps)
    if objection is not None:
        return objection
    if matrix.projection.rows != steps.num_experts:
        return Decline(
            "rows", str(steps.num_experts), str(matrix.projection.rows), "Check the router's matrix."
        )
    return row_product.check(RowProduct(matrix.projection.cols, (Product(matrix),), norm))


def zeros(x: mx.array) -> mx.array:
    """Words of zero for the counter, made anew for each row ``x`` ``[1, 1, H]``.

    They are a function of the row, so that no two calls share them.
    """
    some = x[..., : _COUNTER_WORDS * mx.uint32.size // x.dtype.size]
    return mx.bitwise_and(some.view(mx.uint32), 0)


def build(
    matrix: Stack,
    norm: Norm | None,
    steps: RouterSteps,
    backend: Backend,
    dtype: mx.Dtype,
    *,
    added: float | None = None,
    logit: str = "v",
    join: bool = False,
    joined: Sequence[Joined] = (),
    state: int = 0,
) -> Piece:
    """The launch for CUDA: outputs ``y0`` (float32 logits), ``normed``, ``chosen`` (uint32) and ``share``.

    ``stream`` comes before ``normed`` where a branch is ``added``. The input ``counter`` counts the blocks
    that have finished. It belongs to one call: MLX may run two calls of one piece at once.

    Args:
        join: as in ``row_product.build``.
        joined: as there.
        logit: what is done to a logit ``v``, as a C expression.
        state: words without a value that the experts' launch wants, as the output ``state``.
    """
    asked = RowProduct(matrix.projection.cols, (Product(matrix),), norm, added)
    how = row_product.cut(asked, "cuda")
    more = Text(
        inputs=dict.fromkeys(("counter", "bias") if steps.bias else ("counter",)),
        outputs={
            "normed": Output.row(asked.width, dtype),
            "chosen": Output.row(steps.top_k, mx.uint32),
            "share": Output.row(steps.top_k, mx.float32),
            **({"state": Output.row(state, mx.uint32)} if state else {}),
        },
        header=f"ME_INLINE float me_logit(float v) {{ return {logit}; }}\n"
        + router_settings(steps, "me_logit(me_fresh(y0 + (i)))"),
        tail=normed_text(asked, how.warps)
        + _emptied(state, how.warps * WARP)
        + text("pieces/select.cu")
        + "{\n"
        + text("router.h")
        + "}\n",
    )
    return row_product.build(
        asked, backend, "cuda", dtype, label="route", wide=True, join=join, joined=joined, how=how, more=more
    )


def _emptied(words: int, step: int) -> str:
    """Writes the words without a value, each group its share."""
    if not words:
        return ""
    first, by = f"group * {step} + tid", f"ME_BLOCKS * {step}"
    return f"for (int i = {first}; i < {words}; i += {by}) state[i] = {NOTHING};\n"


def normed_text(asked: RowProduct, warps: int) -> str:
    """Writes the normalised row, each group its share, for the experts that read it next."""
    row = "me_value(x[i])"
    if asked.added is not None:
        row = f"({row} + {float(asked.added)!r}f * me_value(branch[i]))"
    if asked.norm is not None and asked.norm.weight is not None:
        row = f"{row} * (me_value(ME_NORM_W[i]) + {float(asked.norm.offset)!r}f)"
    step = warps * 32
    return (
        f"for (int i = group * {step} + tid; i < ME_H; i += ME_BLOCKS * {step})\n"
        f"me_set(normed + i, {row} * factor);\n"
    )
