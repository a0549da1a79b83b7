"""Attention whose rotary cosines and sines are learned mixtures of frequencies (FoPE, arXiv 2412.17739).

Legend: B batch, L tokens, g key-value heads, d head width, F frequencies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.module_tree import place
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.rope_plan import FLOAT32_LARGEST, FLOAT32_LEAST
from mlx_experts.registry.spec.values import Bool, Count, Num, Spec

LEAVES = ("cos_coef", "sin_coef")


class FourierOptions(Spec):
    """Options of attention with mixed frequencies."""

    attention: GqaSpec = Field(description="The attention; it has no rotation of its own.")
    theta: Num = Field(description="Base of the frequencies.")
    count: Count = Field(
        0, description="Frequencies that are mixed; 0 for those that turn once in the context."
    )
    by_head: Bool = Field(True, description="Whether each key-value head has coefficients of its own.")


class FourierAttention(Attention):
    """``x cos + half(x) sin`` with ``cos = cos(f p) C`` and ``sin = sin(f p) S``, padded with ones.

    After SGLang's ``srt/layers/rotary_embedding/rope_variant.py``. Query heads turn as their key-value head.

    Args:
        layer: the layer's plan; the mixer's options are :class:`FourierOptions`.
        plan: the model's plan.

    Raises:
        ConfigError: there are more frequencies than a head has, or their base is not positive.
    """

    float32_leaves: ClassVar[tuple[str, ...]] = tuple(f"rotary.{leaf}" for leaf in LEAVES)

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        spec = mixer_options(FourierOptions, layer, "attention with mixed frequencies")
        super().__init__(dataclasses.replace(layer, mixer=spec.attention), plan)
        half = self.head_dim // 2
        if not FLOAT32_LEAST <= spec.theta <= FLOAT32_LARGEST:
            raise ConfigError(
                "'rope_theta' must be a positive number",
                where="config.json",
                expected=f"a number from {FLOAT32_LEAST:g} to {FLOAT32_LARGEST:g}",
                found=str(spec.theta),
            )
        every = [float(spec.theta) ** (-2.0 * i / self.head_dim) for i in range(half)]
        longest = plan.sizes.max_positions or 0
        kept = (
            every[: spec.count] if spec.count else [f for f in every if f > 2.0 * math.pi / max(longest, 1)]
        )
        if not kept or spec.count > half:
            raise ConfigError(
                "the frequencies that a head mixes do not fit it",
                where="config.json, num_inv_freq or max_position_embeddings",
                expected=f"1 to {half}",
                found=str(spec.count or len(kept)),
            )
        self._inverse, self._padding, self._by_head = kept, half - len(kept), spec.by_head
        shape = (len(kept), len(kept))
        for leaf in LEAVES:
            place(self, f"rotary.{leaf}", mx.zeros((self.kv_heads, *shape) if spec.by_head else shape))

    def bind_heads(self, heads: int, leaf: str) -> Callable[[mx.array, Any], mx.array]:
        """Queries or keys [B, L, heads * d] to heads [B, heads, L, d], normalised and turned."""
        qk, d, each = self._spec.qk_norm, self.head_dim, heads // self.kv_heads
        norm = self._normalise(leaf) if qk is not None and qk.enabled else None

        def turned(t: mx.array, offset: Any) -> mx.array:
            t = mx.unflatten(t, -1, (heads, d))
            t = (t if norm is None else norm(t)).swapaxes(1, 2)
            cos, sin = (mx.repeat(table, each, axis=1) for table in self._tables(offset, t.shape[2]))
            wide = t.astype(mx.float32)
            a, b = mx.split(wide, 2, axis=-1)
            return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(t.dtype)

        return turned

    def _tables(self, offset: Any, length: int) -> list[mx.array]:
        """Cosines and sines [B or 1, g, L, d / 2] of the positions from ``offset`` on."""
        first = offset[:, None] if isinstance(offset, mx.array) and offset.ndim else mx.array([[offset]])
        angles = (first + mx.arange(length)).astype(mx.float32)[..., None] * mx.array(self._inverse)
        tables = []
        for waves, leaf in ((mx.cos(angles), LEAVES[0]), (mx.sin(angles), LEAVES[1])):
            mixed = waves[:, None] @ self["rotary"][leaf].astype(mx.float32)
            pad = [(0, 0)] * (mixed.ndim - 1) + [(0, self._padding)]
            mixed = mx.pad(mixed, pad, constant_values=1.0)
            tables.append(mx.broadcast_to(mixed, (mixed.shape[0], self.kv_heads, *mixed.shape[2:])))
        return tables

    def cuts(self) -> Cuts:
        """Each rank keeps some of the heads, with their coefficients."""
        cuts = super().cuts()
        own = self.float32_leaves if self._by_head else ()
        return dataclasses.replace(cuts, heads=(*cuts.heads, *own))


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `fourier`."""
    return {"fourier": FourierAttention}
