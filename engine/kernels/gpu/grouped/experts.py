"""The experts of many tokens in five launches; no decoded weights are kept in memory.

Pairs of a token and an expert are ordered by expert. Launch A multiplies an expert's packed gate and up rows
with all of its tokens on tensor cores, decoding them to bfloat16 on the way, launch B does the same with the
down rows, and the last launch sums each token's outputs in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import mlx.core as mx

from mlx_experts.engine.kernels.expert_weights import ExpertWeights, Stack
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.source import (
    NVFP4_UNIT,
    WARP,
    Backend,
    Launch,
    activation_text,
    array_names,
    defines,
    format_number,
    text,
)
from mlx_experts.engine.kernels.gpu.tiles.form import CHUNK, STEP, tile_text
from mlx_experts.engine.kernels.request import Decline, KernelRequest, Projection

PATH: Literal["grouped"] = "grouped"
# Tokens of an expert that a block takes, steps of them on their way, and warps of a block.
TILE, _STAGES, _WARPS = 64, 3, 8
_PITCH, _ORDER_WARPS, _SUM_WARPS = 20, 4, 4
MAX_EXPERTS = 4096
_CODECS = {"affine": "codec_affine", "plain": "codec_plain"}


def takes(request: KernelRequest) -> bool:
    """Whether every projection fits: bfloat16 activations, any packed format, whole chunks of inputs."""
    parts = [p for p in (request.gate, request.up, request.down) if p is not None]
    kinds = {(p.format, p.bits, p.group_size, p.dtype) for p in parts[:-1]}
    return (
        request.dtype == "bfloat16"
        and len(kinds) == 1
        and request.num_experts <= MAX_EXPERTS
        and all(p.cols % CHUNK == 0 and p.rows % 4 == 0 for p in parts)
        and all(p.format != "plain" or p.dtype == "bfloat16" for p in parts)
    )


def declines(request: KernelRequest) -> Decline | None:
    """What this machine, or this request, lacks."""
    if why := cuda.unavailable():
        return why
    if cuda.capability() is None:
        return Decline("many_rows", "compute capability 8.0", "an older GPU", "Many rows are gathered.")
    if takes(request):
        return None
    return Decline(
        "many_rows",
        "bfloat16 activations, gate and up stored alike",
        f"{request.dtype} activations, {request.up.storage}",
        "Many rows are gathered.",
    )


def workspace_bytes(request: KernelRequest) -> int:
    """Bytes of the rows by expert, of their activations, and of their outputs in float32."""
    h, f = request.input_width, request.expert_width
    return request.rows * request.top_k * (2 * STEP * (_steps(h) + _steps(f)) + 4 * h)


def prepare(experts: ExpertWeights, request: KernelRequest, dtype: mx.Dtype | None = None) -> GroupedExperts:
    """The path for one layer.

    Args:
        dtype: of the result; None for bfloat16.
    """
    return GroupedExperts(cuda.BACKEND, experts, request, dtype or mx.bfloat16)


def _steps(cols: int) -> int:
    return -(-cols // STEP)


def _line(part: str, p: Projection) -> str:
    """The scale and bias of one chunk of a row, as an expression in ``at``."""
    if p.format == "plain":
        return "me_line{}"
    if p.format == "affine":
        scale, bias = f"me_value({part}_s[at])", f"me_value({part}_b[at])"
        offset = "0.0f" if p.bits == 8 else "128.0f"
        return f"me_line{{{{{scale}}}, {bias} - {offset} * {scale}}}"
    factor = "0x1p56f" if p.bits == 8 else "0x1p62f"
    if p.format == "nvfp4":
        every = f" * ({part}_g[e] * {NVFP4_UNIT!r}f)" if p.global_scale else ""
        halves = ", ".join(f"me_half(({part}_s[(at) + {i}] & 0x7Fu) << 7) * 0x1p70f{every}" for i in range(2))
        return f"me_line{{{{{halves}}}, 0.0f}}"
    return f"me_line{{{{me_bits(me_uint({part}_s[at]) << 23) * {factor}}}, 0.0f}}"


def _bias(part: str, p: Projection, row: str) -> str:
    return f"(v + me_value({part}_c[{row}]))" if p.bias else "(v)"


def _product(
    backend: Backend,
    request: KernelRequest,
    low: tuple[str, Stack],
    high: tuple[str, Stack],
    *,
    gated: bool,
    keep: str,
    end: str,
    label: str,
) -> tuple[Launch, dict[str, mx.array]]:
    (low_part, low_stack), (high_part, high_stack) = low, high
    p = high_stack.projection
    tiles = 1 if p.bits == 16 else 2
    row_blocks = -(-p.rows // ((8 if gated else 16) * tiles * _WARPS))
    arrays = array_names(high_part, high_stack) | (array_names(low_part, low_stack) if gated else {})
    settings = {
        "ROWS": p.rows,
        "COLS": p.cols,
        "E": request.num_experts,
        "BITS": p.bits,
        "WIDE": 1,
        "UNIT": 1,
        "SPAN": STEP,
        "FORMAT": format_number(p),
        "GROUP_SIZE": p.group_size or STEP,
        "PER_ROW": p.cols // p.group_size if p.group_size else 0,
        "SCALE_TYPE": {"bfloat16": "__nv_bfloat16", "float16": "__half"}.get(p.dtype, "float"),
        "IS_HALF": 0,
        "GATED": int(gated),
        "TILES": tiles,
        "WARPS": _WARPS,
        "TILE": TILE,
        "STAGES": _STAGES,
        "ROW_BLOCKS": row_blocks,
        "ACT_STEPS": _steps(request.expert_width),
        "LOW(p)": f"{low_part}_##p",
        "HIGH(p)": f"{high_part}_##p",
        "LOW_LINE(at)": _line(low_part, p),
        "HIGH_LINE(at)": _line(high_part, p),
        "END_GATE(v)": _bias(low_part, low_stack.projection, "row"),
        "END_UP(v)": _bias(high_part, p, "up_row"),
        "END(v)": end,
        "KEEP(pair, row, value)": keep,
    }
    codec = _CODECS.get(p.format, "codec_float")
    header = text(backend.prelude) + defines(settings) + tile_text("tensor", "chunk", codec)
    header += text("grouped/codec.cu") + tile_text("place") + text("grouped/keep.cu")
    header += activation_text(request.activation) or ""
    bounds = f"__attribute__((global)) __attribute__((launch_bounds({_WARPS * WARP})))"
    header += f"#undef __global__\n#define __global__ {bounds}\n"
    launch = Launch(
        label=label,
        inputs=("rows", "starts", *arrays),
        outputs=("out",),
        header=header,
        source=backend.opening + text("grouped/product.cu"),
        groups=row_blocks,
        warps=_WARPS,
        shared=_STAGES * TILE * _PITCH * 16 + 16,
    )
    return launch, arrays


@dataclass(eq=False)
class GroupedExperts:
    """One layer's experts as a function of many tokens (see ``FusedRun``).

    Args:
        request: what it was accepted for, whatever its rows.
        dtype: of the result.
        options: passed to every launch, for tests.
    """

    backend: Backend
    experts: ExpertWeights
    request: KernelRequest
    dtype: mx.Dtype = mx.bfloat16
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        r, w = self.request, self.experts
        backend = self.backend
        gate = ("up", w.up) if w.gate is None else ("gate", w.gate)
        value = "me_activation(0.0f, v)" if w.gate is None else "v"
        keep = "me_keep(out, pair, row, value)"
        self.up, self._up_arrays = _product(
            backend, r, gate, ("up", w.up), gated=w.gate is not None, keep=keep, end=value, label="grouped_up"
        )
        keep = f"out[int64_t(pair) * {w.down.projection.rows} + (row)] = value"
        down = ("down", w.down)
        self.down, self._down_arrays = _product(
            backend, r, down, down, gated=False, keep=keep, end="v", label="grouped_down"
        )
        self._order, self._sum = self._order_launch(), self._sum_launch()

    def _order_launch(self) -> Launch:
        """Orders tokens by expert; a group a pair, then groups for where each expert's pairs begin."""
        r = self.request
        settings = {
            "H": r.input_width,
            "K": r.top_k,
            "E": r.num_experts,
            "STEPS": _steps(r.input_width),
            "WARPS": _ORDER_WARPS,
            "START_BLOCKS": self._start_blocks(),
        }
        return Launch(
            label="grouped_order",
            inputs=("x", "order", "experts"),
            outputs=("rows", "starts", "places"),
            header=text(self.backend.prelude) + defines(settings) + tile_text("place"),
            source=self.backend.opening + text("grouped/order.cu"),
            groups=1,
            warps=_ORDER_WARPS,
        )

    def _start_blocks(self) -> int:
        return -(-(self.request.num_experts + 1) // (_ORDER_WARPS * WARP))

    def _sum_launch(self) -> Launch:
        """Sums a token's outputs; as many groups a token as its width needs."""
        h = self.request.input_width
        blocks = -(-h // (_SUM_WARPS * WARP * 4))
        settings = {"H": h, "K": self.request.top_k, "WARPS": _SUM_WARPS, "BLOCKS": blocks}
        return Launch(
            label="grouped_sum",
            inputs=("outputs", "places", "weights"),
            outputs=("y",),
            header=text(self.backend.prelude) + defines(settings),
            source=self.backend.opening + text("grouped/sum.cu"),
            groups=blocks,
            warps=_SUM_WARPS,
        )

    def plan(self, tokens: int) -> list[tuple[Launch, int, list[tuple[int, ...]], list[mx.Dtype]]]:
        """Each launch for a number of tokens: itself, how often its groups, its outputs' shapes and types."""
        r = self.request
        pairs = tokens * r.top_k
        tiles = pairs // TILE + r.num_experts + 1
        act = (pairs, _steps(r.expert_width) * STEP)
        return [
            (
                self._order,
                pairs + self._start_blocks(),
                [(pairs, _steps(r.input_width) * STEP), (r.num_experts + 1,), (pairs,)],
                [mx.bfloat16, mx.int32, mx.uint32],
            ),
            (self.up, tiles, [act], [mx.bfloat16]),
            (self.down, tiles, [(pairs, r.input_width)], [mx.float32]),
            (self._sum, tokens, [(tokens, r.input_width)], [self.dtype]),
        ]

    def held(self) -> list[dict[str, mx.array]]:
        """The weights that each launch reads."""
        return [{}, self._up_arrays, self._down_arrays, {}]

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``x [..., H]``, ``indices`` and ``weights`` ``[..., K]`` to ``y`` like ``x``."""
        tokens = prod(x.shape[:-1])
        flat = mx.stop_gradient(indices).astype(mx.uint32).reshape(-1)
        order = mx.argsort(flat).astype(mx.uint32)
        ordering, up, down, summing = self.plan(tokens)
        rows, starts, places = self._launch(0, ordering, [x.reshape(tokens, -1), order, flat[order]])
        (act,) = self._launch(1, up, [rows, starts])
        (outputs,) = self._launch(2, down, [act, starts])
        (y,) = self._launch(3, summing, [outputs, places, weights.astype(mx.float32).reshape(tokens, -1)])
        return y.reshape(x.shape)

    def _launch(
        self,
        number: int,
        planned: tuple[Launch, int, list[tuple[int, ...]], list[mx.Dtype]],
        given: Sequence[mx.array],
    ) -> list[mx.array]:
        launch, times, shapes, dtypes = planned
        arrays = [*given, *self.held()[number].values()]
        run = launch.make(self.backend, [*(a.dtype for a in arrays), *dtypes], shapes, times, **self.options)
        return run(arrays)
