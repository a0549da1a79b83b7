"""Grouped-query attention whose logits are changed before the softmax: bounded, scaled, or joined by sinks.

Legend: B batch, L tokens, T keys, h query heads, g key-value heads, d head width, S sinks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from pydantic import Field

from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.options import mixer_options
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.family import GqaSpec
from mlx_experts.registry.spec.values import Bool, Count, Leaf, Num, Spec, Width


class SinkKeysSpec(Spec):
    """Learned keys that every query sees, with learned values or with values of zero."""

    keys: Leaf = Field(description="Leaf of the keys, [S, g, d].")
    values: Leaf | None = Field(None, description="Leaf of the values, [S, g, d]; null for zero.")
    count: Count = Field(description="Sinks.")
    normed: bool = Field(False, description="The key norm applies to them, too.")
    enabled: Bool = Field(True, description="Whether there are any.")
    valued: Bool = Field(True, description="Whether the values are learned, where they have a leaf.")


class AdjustedOptions(Spec):
    """Options of attention whose logits are changed before the softmax."""

    attention: GqaSpec = Field(description="The attention.")
    head_parts: list[Width] = Field([], description="Widths that add up to that of a head, where stated so.")
    key_norm_only: bool = Field(False, description="Queries are not normalised, where keys are.")
    softcap: Num = Field(0.0, description="`cap * tanh(logits / cap)`; 0 for none.")
    long_after: Num = Field(
        0,
        description="Logits of queries at later positions p are multiplied by log(p) / log(this).",
    )
    sinks: SinkKeysSpec | None = Field(None, description="Sinks with keys.")


class AdjustedAttention(Attention):
    """Attention as SGLang's ``srt/models/grok.py`` and ``iquest_q1.py`` have it, and vLLM's ``openpangu.py``.

    Args:
        layer: the layer's plan; the mixer's options are :class:`AdjustedOptions`.
        plan: the model's plan.
    """

    def __init__(self, layer: LayerPlan, plan: Plan) -> None:
        self._adjusted = spec = mixer_options(AdjustedOptions, layer, "attention with adjusted logits")
        attention = spec.attention.model_copy(update={"rope": layer.rope})
        if spec.head_parts:
            attention = attention.model_copy(update={"head_dim": sum(spec.head_parts)})
        super().__init__(dataclasses.replace(layer, mixer=attention), plan)
        if spec.key_norm_only:
            self.pop(self._leaves[0], None)
        sinks = spec.sinks
        self._sinks = sinks if sinks is not None and sinks.enabled and sinks.count else None
        if self._sinks is not None:
            self[self._sinks.keys] = mx.zeros((self._sinks.count, self.kv_heads, self.head_dim))
            if self._sinks.values is not None and self._sinks.valued:
                self[self._sinks.values] = mx.zeros((self._sinks.count, self.kv_heads, self.v_head_dim))

    def bind_queries(self) -> Callable[[mx.array, Any], mx.array]:
        """As for any attention, without the norm where only keys have one."""
        if not self._adjusted.key_norm_only:
            return super().bind_queries()
        rope = self._rope.bound() if self._rope is not None else None

        def turn(t: mx.array, offset: Any) -> mx.array:
            t = mx.unflatten(t, -1, (self.heads, self.head_dim)).swapaxes(1, 2)
            return t if rope is None else rope(t, offset=offset)

        return turn

    def cuts(self) -> Cuts:
        """As for any attention, where there are no sinks.

        Raises:
            ConfigError: sinks hold keys of all heads.
        """
        if self._sinks is not None:
            raise ConfigError(
                "attention with learned sink keys cannot be spread over ranks", where=f"layer {self._layer}"
            )
        return super().cuts()

    def _attend(self, output: Any) -> Callable[..., mx.array]:
        width, sinks = self.heads * self.v_head_dim, self._sinks
        plain = not self._adjusted.softcap and self._adjusted.long_after <= 0

        def attend(q: mx.array, k: Any, v: Any, cache: Any, mask: Any, x: mx.array, gate: Any) -> mx.array:
            B, _, L, _ = q.shape
            k, v = (_as_array(t, cache) for t in (k, v))
            if sinks is not None:
                mask = _as_mask(mask, L, k.shape[2])
                k, v, mask = self._with_sinks(k, v, mask)
            if plain:
                out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
            else:
                # A rotating cache has given up its oldest keys, and counts on.
                last = k.shape[2] if cache is None else cache.offset
                out = self._by_steps(q, k, v, _as_mask(mask, L, k.shape[2]), last)
            out = out.swapaxes(1, 2).reshape(B, L, width)
            return output(out, x, gate) if self._gated else output(out)

        return attend

    def _with_sinks(self, k: mx.array, v: mx.array, mask: mx.array | None) -> tuple[Any, Any, Any]:
        """Keys and values [B, g, S + T, d] with the sinks before them, and a mask that shows those."""
        spec = self._sinks
        assert spec is not None
        keys = self[spec.keys]
        if spec.normed:
            keys = self._normalise(self._leaves[1])(keys)
        shape = (spec.count, self.kv_heads, self.v_head_dim)
        values = self[spec.values] if spec.values is not None and spec.valued else mx.zeros(shape)
        pairs = ((keys, k), (values, v))
        k, v = (mx.concatenate([_in_rows(s, t), t], axis=2) for s, t in pairs)
        if mask is None:
            return k, v, None
        seen = mx.ones((*mask.shape[:-1], spec.count), dtype=mx.bool_)
        return k, v, mx.concatenate([seen, mask], axis=-1)

    def _by_steps(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, last: Any) -> mx.array:
        """Attention [B, h, L, d] with a bound on the logits and a factor by the query's position."""
        spec, L = self._adjusted, q.shape[2]
        q, cap = mx.unflatten(q.astype(mx.float32) * self.scale, 1, (self.kv_heads, -1)), spec.softcap
        logits = q @ k[:, :, None].astype(mx.float32).swapaxes(-1, -2)
        if cap:
            logits = cap * mx.tanh(logits / cap)
        if spec.long_after > 0:
            ends = mx.array(last).reshape(-1, 1)
            places = (ends - L + mx.arange(L)).astype(mx.float32)
            longer = mx.log(mx.maximum(places, 1.0)) / mx.log(mx.array(float(spec.long_after)))
            factor = mx.where(places > spec.long_after, longer, 1.0)
            logits = logits * factor[:, None, None, :, None]
        if mask is not None:
            mask = mask if mask.ndim < 4 else mask[:, :, None]
            logits = mx.where(mask, logits, -mx.inf)
        weights = mx.softmax(logits, axis=-1, precise=True)
        out = weights @ v[:, :, None].astype(mx.float32)
        return out.flatten(1, 2).astype(v.dtype)


def _in_rows(sinks: mx.array, like: mx.array) -> mx.array:
    """Sinks [S, g, d] for every row of ``like`` [B, g, T, d]: [B, g, S, d]."""
    heads = sinks.swapaxes(0, 1).astype(like.dtype)
    return mx.broadcast_to(heads, (like.shape[0], *heads.shape))


def _as_array(t: Any, cache: Any) -> mx.array:
    """Keys or values as numbers, also of a cache that keeps them quantised."""
    if isinstance(t, mx.array):
        return t
    weight, scales, biases = t
    return mx.dequantize(weight, scales, biases, group_size=cache.group_size, bits=cache.bits)


def _as_mask(mask: Any, length: int, keys: int) -> mx.array | None:
    """A mask as an array, also where it is the word `causal`."""
    if not isinstance(mask, str):
        return mask  # type: ignore[no-any-return]
    return mx.arange(keys - length, keys)[:, None] >= mx.arange(keys)


@hookimpl
def register_mixers() -> dict[str, Any]:
    """The mixer `adjusted`."""
    return {"adjusted": AdjustedAttention}
