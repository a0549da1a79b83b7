"""What the layers of one forward pass share: masks, and values that one layer leaves for another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import BatchKVCache


@dataclass(frozen=True, eq=False)
class KeptAttention:
    """What a layer's attention leaves for later layers of its type that have no keys of their own.

    Args:
        keys: ``[B, g, T, d]``, rotated, as the cache gave them.
        values: ``[B, g, T, d]``.
        cache: where they lie.
        mask: which keys each query sees.
        offset: position of the first query.
    """

    keys: mx.array
    values: mx.array
    cache: Any
    mask: Any
    offset: Any


@dataclass(frozen=True, eq=False)
class KeptLatents:
    """What a layer's latent attention leaves for later layers that have no latents of their own.

    Args:
        latent: ``[B, 1, T, c]``.
        key: the rotated key that all heads share, ``[B, 1, T, r]``.
        offset: position of the first query.
        seen: tokens that were cached before.
        padding: columns ``[B]`` before the first real token of each row, or None.
        mask: which keys each query sees.
    """

    latent: mx.array
    key: mx.array
    offset: Any
    seen: int
    padding: mx.array | None
    mask: Any


@dataclass(eq=False)
class ForwardState:
    """Made for each call of the model.

    Args:
        inputs: token ids ``[B, L]``.
        dtype: the type that the model computes in, where it is known.
        projected_kv: keys and values ``[B, L, g * d]`` that the last layer with projections has projected.
        kept: attention by layer type, for layers that reuse keys and values.
        layer_inputs: the narrow second embedding's part for every layer, ``[B, L, N, P]``.
        picked_tokens: the keys ``[B, 1, L, top-k]`` that the last layer with an indexer selected, and which
            of them count (None for all).
        latents: latent attention by whether its key is rotated, for layers that have no latents.
        log_frequencies: learned logarithms of factors on rotary frequencies, ``[dims / 2]``.
        router_memory: what a router with a memory leaves for the next layer's, ``[B, L, width]``.
    """

    inputs: mx.array
    dtype: mx.Dtype | None = None
    projected_kv: tuple[mx.array, mx.array] | None = None
    kept: dict[str, KeptAttention] = field(default_factory=dict)
    layer_inputs: mx.array | None = None
    picked_tokens: tuple[mx.array, mx.array | None] | None = None
    latents: dict[bool, KeptLatents] = field(default_factory=dict)
    log_frequencies: mx.array | None = None
    router_memory: mx.array | None = None
    _masks: dict[Any, Any] = field(default_factory=dict)
    _positions: dict[int, mx.array] = field(default_factory=dict)

    def position(self, offset: Any) -> mx.array:
        """A cache's offset as the first of at least four values, int32; once for equal numbers.

        An array, because a number that changes at each token would be compiled anew. Four values, because MLX
        keeps arrays of up to 8 bytes where a GPU reads them slowly. They are made on the device: handing them
        over takes a host with CUDA some 70 us.
        """
        if isinstance(offset, mx.array):
            return mx.broadcast_to(offset.reshape(-1)[:1], (4,)).astype(mx.int32)
        position = self._positions.get(offset)
        if position is None:
            position = self._positions[offset] = mx.arange(offset, offset + 4, dtype=mx.int32)
        return position

    def attention_mask(
        self, x: mx.array, cache: Any, window: int | None = None, as_array: bool = False
    ) -> Any:
        """The causal (and windowed) mask for a layer; made once for each kind of cache and window.

        Args:
            as_array: not the word `causal` for a plain causal mask.
        """
        key = (type(cache), window, as_array)
        if key not in self._masks:
            self._masks[key] = create_attention_mask(x, cache, window_size=window, return_array=as_array)
        return self._masks[key]

    def chunked_mask(self, x: mx.array, cache: Any, chunk: int) -> mx.array:
        """A causal mask ``[.., L, keys]`` that hides tokens of earlier chunks of ``chunk`` tokens.

        Chunks are counted from a sequence's first real token, so rows of a padded batch have their own.
        """
        key = (type(cache), "chunk", chunk)
        if key not in self._masks:
            length = x.shape[1]
            offset = cache.offset if cache is not None else 0
            padding = cache.left_padding if isinstance(cache, BatchKVCache) else 0
            queries = _column(offset) + mx.arange(length)
            causal = create_attention_mask(x, cache, return_array=True)
            count = length + int(offset) if causal is None else causal.shape[-1]
            keys = mx.arange(count) - _column(padding)
            same = queries[..., :, None] // chunk == keys[..., None, :] // chunk
            if same.ndim == 3:
                same = same[:, None]
            self._masks[key] = same if causal is None else same & causal
        return self._masks[key]

    def recurrent_mask(self, x: mx.array, cache: Any) -> Any:
        """Which positions of a padded batch are real, for recurrent mixers; None when all are."""
        if "recurrent" not in self._masks:
            self._masks["recurrent"] = create_ssm_mask(x, cache)
        return self._masks["recurrent"]


def _column(value: Any) -> Any:
    """Offsets of a batch as a column, a plain number as it is."""
    return value[:, None] if isinstance(value, mx.array) and value.ndim else value
