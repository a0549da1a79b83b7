"""One launch for a token of a gated delta net between its linear layers (Yang et al. 2024).

The short convolution with its memory, the unit lengths of query and key, the decay and the correction of the
state, and the gated norm of what is read from it. The mathematics is that of transformers'
``models/qwen3_next/modeling_qwen3_next.py`` (``torch_recurrent_gated_delta_rule``). Everything is float32 and
every output is rounded once.
Legend: g key heads, h value heads, dk and dv their widths, C = 2 g dk + h dv channels, K taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_experts.engine.kernels.gpu.pieces.packed import Output, output_text, pack
from mlx_experts.engine.kernels.gpu.pieces.piece import Constants, Piece, bounded
from mlx_experts.engine.kernels.gpu.source import Backend, Launch, defines, text
from mlx_experts.engine.kernels.request import Decline, Device

_WIDEST, _MOST_WARPS = 256, 16
_OPEN = {"silu": "v / (1.0f + me_exp(-v))", "sigmoid": "1.0f / (1.0f + me_exp(-v))"}


@dataclass(frozen=True, eq=False)
class DeltaStep:
    """What a token needs beside the rows of the projections.

    Args:
        by_key_head: there are two rows, ``[q, k, v, z]`` and ``[b, a]`` of each key head; otherwise four,
            ``[q, k, v]``, z, b and a.
        gate: ``silu`` or ``sigmoid`` of z multiplies what the norm gives.
        conv: ``[C, K, 1]``.
        decay: ``[h]``, the logarithm of the rate of forgetting.
        shift: ``[h]``, added to a.
        norm: ``[dv]``, the weight of the last norm.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    by_key_head: bool
    gate: str
    eps: float
    conv: mx.array
    decay: mx.array
    shift: mx.array
    norm: mx.array

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def rows(self) -> int:
        """Rows that the projections give."""
        return 2 if self.by_key_head else 4


def check(step: DeltaStep) -> Decline | None:
    """Why the kernel leaves this to plain MLX, or None when it takes it."""
    for name, width in (("key_dim", step.key_dim), ("value_dim", step.value_dim)):
        if width > _WIDEST or width % 8:
            return Decline(name, f"a multiple of 8 up to {_WIDEST}", str(width), "It runs in plain MLX.")
    if step.kernel < 2:
        return Decline("kernel", "a convolution over two tokens or more", str(step.kernel), "Nothing.")
    return None


def _row_text(step: DeltaStep) -> dict[str, str]:
    """Where the values of this value head lie in the rows, as C expressions in ``i``."""
    dk, dv, ratio = step.key_dim, step.value_dim, step.value_heads // step.key_heads
    keys = step.key_heads * dk
    if step.by_key_head:
        row = f"key * {2 * dk + 2 * ratio * dv}"
        return {
            "Q(i)": f"me_value(r0[{row} + (i)])",
            "K(i)": f"me_value(r0[{row} + {dk} + (i)])",
            "V(i)": f"me_value(r0[{row} + {2 * dk} + own * {dv} + (i)])",
            "Z(i)": f"me_value(r0[{row} + {2 * dk + ratio * dv} + own * {dv} + (i)])",
            "B": f"me_value(r1[key * {2 * ratio} + own])",
            "A": f"me_value(r1[key * {2 * ratio} + {ratio} + own])",
        }
    return {
        "Q(i)": f"me_value(r0[key * {dk} + (i)])",
        "K(i)": f"me_value(r0[{keys} + key * {dk} + (i)])",
        "V(i)": f"me_value(r0[{2 * keys} + head * {dv} + (i)])",
        "Z(i)": f"me_value(r1[head * {dv} + (i)])",
        "B": "me_value(r2[head])",
        "A": "me_value(r3[head])",
    }


def build(
    step: DeltaStep,
    backend: Backend,
    device: Device,
    dtype: mx.Dtype,
    *,
    join: bool = False,
) -> Piece:
    """The launch as a function of a token's arrays.

    Inputs by name: the rows ``r0`` and on, ``past`` ``[1, K - 1, C]`` and ``memory`` ``[1, h, dv, dk]``, as
    the cache holds them. Outputs: ``y`` ``[1, 1, h * dv]``, ``new_past`` and ``new_memory``.

    Args:
        dtype: of ``y`` and ``new_past``; ``new_memory`` is float32.
        join: as in ``row_product.build``.
    """
    rows = [f"r{i}" for i in range(step.rows)]
    inputs: dict[str, mx.array | None] = dict.fromkeys([*rows, "past", "memory"])
    constants = Constants(join)
    held = {
        "CONV": constants.add(step.conv),
        "DECAY": constants.add(step.decay),
        "SHIFT": constants.add(step.shift),
        "NORM": constants.add(step.norm),
    }
    inputs |= constants.inputs()
    outputs = {
        "y": Output.row(step.value_heads * step.value_dim, dtype),
        "new_past": Output((1, step.kernel - 1, step.channels), dtype),
        "new_memory": Output((1, step.value_heads, step.value_dim, step.key_dim), mx.float32),
    }
    packed = pack(outputs, device)
    written, places = output_text(outputs, packed)
    warps = min(_MOST_WARPS, step.value_dim)
    settings = defines(
        {
            "DK": step.key_dim,
            "DV": step.value_dim,
            "KEYS": step.key_heads,
            "RATIO": step.value_heads // step.key_heads,
            "CHANNELS": step.channels,
            "TAPS": step.kernel,
            "EACH": -(-step.key_dim // 32),
            "ROWS": -(-step.value_dim // warps),
            "WARPS": warps,
            "SCALE": f"{step.key_dim**-0.5!r}f",
            "EPS": f"{float(step.eps)!r}f",
            "OPEN": _OPEN[step.gate],
            **held,
            **_row_text(step),
        }
    )
    launch = Launch(
        label="delta_step",
        inputs=tuple(inputs),
        outputs=written,
        header=text(backend.prelude) + settings + text("pieces/gates.h") + bounded(device, warps),
        source=backend.opening + places + text("pieces/delta_step.h"),
        groups=step.value_heads,
        warps=warps,
    )
    return Piece(backend, launch, inputs, outputs, packed)
