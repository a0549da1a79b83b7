"""Mamba: a selective state space with a decay for every channel and state (Gu and Dao 2023).

Legend: B batch, L tokens, D model width, C inner channels, n state size, r rank of the time step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from pydantic import Field

from mlx_experts.engine.kernels.activations import apply, make
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.conv import causal_conv, make_causal_conv
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Bool, Spec, Str, Width

# Fewer tokens than SHORT gain nothing from chunks; MOST_DECAYS bounds what is worked out at once.
SHORT, MOST_DECAYS = 16, 2**25


class Mamba1Options(Spec):
    """Options of a Mamba mixer."""

    expand: Width = Field(description="Inner channels for each channel of the model.")
    state: Width = Field(description="State size of each channel.")
    kernel: Width = Field(description="Width of the convolution.")
    rank: Width | Literal["auto"] = Field(
        description="Rank of the time step; `auto` for a 16th of the width."
    )
    conv_bias: Bool = Field(description="Whether the convolution has a bias.")
    bias: Bool = Field(description="Biases on the input and output projections.")
    activation: Str = Field("silu", description="Activation after the convolution.")


def selective_scan(
    dt: mx.array, u: mx.array, b: mx.array, c: mx.array, a: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """``memory = exp(dt a) memory + u b``, read by ``c``, token after token (Gu and Dao 2023, section 3).

    Args:
        dt: time steps [B, L, C]; 0 where no time passes.
        u: inputs times time steps [B, L, C].
        b: input vectors [B, L, n].
        c: output vectors [B, L, n].
        a: decay rates [C, n].
        memory: the state before the first token [B, C, n].

    Returns:
        Outputs [B, L, C] and the last state.
    """
    tokens, outputs = max(1, MOST_DECAYS // memory.size), []
    for start in range(0, dt.shape[1], tokens):
        dt_, u_, b_, c_ = (x[:, start : start + tokens] for x in (dt, u, b, c))
        y, memory = _scan_chunks(dt_, u_, b_, c_, a, memory)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), memory


def _scan_chunks(
    dt: mx.array, u: mx.array, b: mx.array, c: mx.array, a: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """As :func:`selective_scan`, in some ``3 sqrt(L)`` steps in place of L.

    Chunks are walked side by side, twice: from nothing, for what each adds to the state, and from the
    state that each then starts with.
    """
    B, L, _ = dt.shape
    chunks = 1 if L < SHORT else round((2 * L) ** 0.5)
    length = -(-L // chunks)
    if chunks == 1:
        dt, u, b, c = (x[:, None] for x in (dt, u, b, c))
    else:
        padding = [(0, 0), (0, chunks * length - L), (0, 0)]
        dt, u, b, c = (mx.unflatten(mx.pad(x, padding), 1, (chunks, length)) for x in (dt, u, b, c))
    decay = mx.exp(dt[..., None] * a)
    states = [memory]
    if chunks > 1:
        added, _ = _walk(decay, u, b, None, mx.zeros((B, chunks, *a.shape)))
        kept = mx.exp(dt.sum(axis=2)[..., None] * a)
        for i in range(chunks):
            states.append(kept[:, i] * states[-1] + added[:, i])
    ends, y = _walk(decay, u, b, c, mx.stack(states[:chunks], axis=1))
    return y.flatten(1, 2)[:, :L], states[-1] if chunks > 1 else ends[:, 0]


def _walk(
    decay: mx.array, u: mx.array, b: mx.array, c: mx.array | None, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Chunks [B, G, T, ...] from their states [B, G, C, n]: the last states and the outputs [B, G, T, C]."""
    step = _step if mx.default_device().type == mx.DeviceType.cpu else _fused_step
    outputs = []
    for t in range(decay.shape[2]):
        memory = step(decay[:, :, t], memory, u[:, :, t], b[:, :, t])
        if c is not None:
            outputs.append((memory * c[:, :, t, None, :]).sum(axis=-1))
    return memory, mx.stack(outputs, axis=2) if outputs else memory


def _step(decay: mx.array, memory: mx.array, u: mx.array, b: mx.array) -> mx.array:
    return decay * memory + u[..., None] * b[..., None, :]


# One launch on a GPU; on the CPU a compiler would be started to save microseconds.
_fused_step = mx.compile(_step)


class Mamba1(RecurrentMixer):
    """A Mamba mixer with norms on its time step and vectors, after transformers' ``models/jamba``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`Mamba1Options`.
        plan: the model's plan.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = ("A_log",)

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        super().__init__()
        spec = mixer_options(Mamba1Options, layer, "a Mamba mixer")
        width, eps = layer.sizes.hidden_size, layer.sizes.norm_eps
        inner = spec.expand * width
        rank = math.ceil(width / 16) if spec.rank == "auto" else spec.rank
        self._activation = make(spec.activation)
        self._cuts = [rank, rank + spec.state]
        self.in_proj = nn.Linear(width, 2 * inner, bias=spec.bias)
        self.conv1d = make_causal_conv(inner, spec.kernel, spec.conv_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * spec.state, bias=False)
        self.dt_proj = nn.Linear(rank, inner, bias=True)
        self.A_log = mx.log(mx.broadcast_to(mx.arange(1.0, spec.state + 1), (inner, spec.state)))
        self.D = mx.ones((inner,))
        self.out_proj = nn.Linear(inner, width, bias=spec.bias)
        self.dt_layernorm = nn.RMSNorm(rank, eps=eps)
        self.b_layernorm = nn.RMSNorm(spec.state, eps=eps)
        self.c_layernorm = nn.RMSNorm(spec.state, eps=eps)

    def mix(self, rows: Sequence[mx.array], mask: mx.array | None, cache: Any) -> mx.array:
        """What the output layer reads, [B, L, C]."""
        h, gate = mx.split(rows[0], 2, axis=-1)
        h = apply(self._activation, None, causal_conv(self.conv1d, h, mask, cache))
        dt, b, c = mx.split(self.x_proj(h), self._cuts, axis=-1)
        dt = nn.softplus(self.dt_proj(self.dt_layernorm(dt)).astype(mx.float32))
        if mask is not None:
            # No time passes at a padded position, so that it leaves the state alone.
            dt = mx.where(mask[..., None], dt, 0)
        wide = h.astype(mx.float32)
        b, c = (norm(row).astype(mx.float32) for norm, row in ((self.b_layernorm, b), (self.c_layernorm, c)))
        a = -mx.exp(self.A_log.astype(mx.float32))
        memory = cache[1] if cache is not None else None
        if memory is None:
            memory = mx.zeros((h.shape[0], *a.shape))
        y, memory = selective_scan(dt, dt * wide, b, c, a, memory)
        if cache is not None:
            cache[1] = memory
        y = (y + self.D.astype(mx.float32) * wide).astype(gate.dtype)
        return y * nn.silu(gate)

    def make_cache(self) -> ArraysCache:
        """The convolution's last inputs and the state ``[B, C, n]``."""
        return ArraysCache(size=2)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `mamba1`."""
    return {"mamba1": Mamba1}
