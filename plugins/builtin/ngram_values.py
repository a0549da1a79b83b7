"""Hashed n-grams of the tokens before, added to every residual stream through a gate and a convolution.

The source is transformers' ``models/qwen4_exp/modeling_qwen4_exp.py`` (PLELayer, NGramEmbedding). Legend: B
batch, L tokens, D model width, N streams, n longest n-gram, m hashes for each n-gram length.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from pydantic import Field

from mlx_experts.engine.layers.conv import with_past
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import look_up
from mlx_experts.engine.layers.options import check_parts, read_options
from mlx_experts.engine.layers.residual.gated import GroupedRMSNorm
from mlx_experts.engine.models.residual_layer import InjectionSpec, form_of
from mlx_experts.plugins.hookspecs import hookimpl
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan
from mlx_experts.registry.spec.values import Count, Spec, Times, Width

_MASK: Final = 2**64 - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_LAYER_STEP: Final = 10007


class NgramValuesOptions(Spec):
    """Options of n-grams that are added to the streams."""

    width: Width = Field(description="Width of all embeddings of a token together.")
    streams: Width = Field(description="Residual streams.")
    kernel: Width = Field(description="Width of the convolution, whose dilation is the longest n-gram.")
    longest: Times = Field(description="Tokens of the longest n-gram, this token included.")
    hashes: Times = Field(description="Hashes for each n-gram length.")
    rows: Width = Field(description="Rows of a hash's table are the next primes from this number on.")
    padded_to: Width = Field(description="All rows together are padded to a multiple of this.")
    seed: Count = Field(description="Seed of the hashes' multipliers.")
    boundary: Count | Annotated[list[Count], Field(min_length=1)] = Field(
        description="Token that no n-gram reaches across; the first of a list."
    )


def multipliers(vocabulary: int, longest: int, place: int, seed: int) -> list[int]:
    """Odd factors of an n-gram's tokens, so small that no product leaves 63 bits (splitmix64 of the seed)."""
    bound = max(1, (2**63 - 1) // max(vocabulary, 1) // 2)
    base = seed + _LAYER_STEP * place
    found = []
    for i in range(longest):
        value = (base + _GAMMA * (i + 1)) & _MASK
        value = (value + _GAMMA) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(2 * ((value ^ (value >> 31)) % bound) + 1)
    return found


def primes_from(start: int, skip: int, count: int) -> list[int]:
    """``count`` primes from ``start`` on, after ``skip`` of them."""
    found: list[int] = []
    value = start - 1
    while len(found) < skip + count:
        value += 1
        if value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1)):
            found.append(value)
    return found[skip:]


class NgramTable(nn.Module):
    """One table for all hashes."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.ngram_embedding = nn.Embedding(rows, width)


class NgramValues(nn.Module):
    """Values that n-grams look up, gated by how each stream meets their keys, with a convolution behind.

    Args:
        layer: the layer's plan.
        plan: the model's plan.
        spec: where the module stands, and its options.

    Raises:
        ConfigError: there are no n-grams, or the width cannot be divided among their hashes.
        SpecError: the layers have another number of streams.
    """

    def __init__(self, layer: LayerPlan, plan: Plan, spec: InjectionSpec) -> None:
        super().__init__()
        self._spec = own = read_options(NgramValuesOptions, spec.options, "n-grams in the streams")
        width, eps, centred = layer.sizes.hidden_size, layer.sizes.norm_eps, plan.norm.offset == "run"
        count = (own.longest - 1) * own.hashes
        if not count:
            raise ConfigError(
                "the longest n-gram is the token itself, so there are none",
                where="config.json or the family file, options of the n-grams",
                expected="`longest` of 2 or more",
                found=str(own.longest),
            )
        check_parts(own.width, count, "the n-grams' width cannot be divided among their hashes")
        if (streams := form_of(plan).streams) != own.streams:
            raise SpecError(
                "what n-grams add has not as many streams as the layers",
                where=f"{plan.family.family}.yaml, block.options.inject",
                expected=f"{streams or 'no'} streams",
                found=str(own.streams),
            )
        place = spec.layers.index(layer.index + spec.base)
        self._boundary = own.boundary if isinstance(own.boundary, int) else own.boundary[0]
        self._sizes = primes_from(own.rows, place * count, count)
        self._factors = multipliers(layer.sizes.vocab_size, own.longest, place, own.seed)
        total = sum(self._sizes)
        rows = -(-total // own.padded_to) * own.padded_to
        self.ple_embedding = NgramTable(rows, own.width // count)
        self.key_proj = nn.Linear(own.width, own.streams * width, bias=False)
        self.value_proj = nn.Linear(own.width, width, bias=False)
        for name in ("norm_key", "norm_query", "norm_conv"):
            self[name] = GroupedRMSNorm(own.streams, width, eps, centred)
        self.conv1d = nn.Conv1d(
            own.streams * width, own.streams * width, own.kernel, groups=own.streams * width, bias=False
        )

    def __call__(self, stream: mx.array, state: ForwardState, cache: Any = None) -> mx.array:
        """What is added to streams [B, L, N, D], of the same shape; extends ``cache``."""
        own, (_, L, N, D) = self._spec, stream.shape
        mask = state.recurrent_mask(stream, cache)
        found = self._look_up(state, mask, cache, stream.dtype)
        key = self.norm_key(mx.unflatten(self.key_proj(found), -1, (N, D)))
        query = self.norm_query(stream)
        gate = (key * query).sum(axis=-1, keepdims=True) * D**-0.5
        gate = mx.sqrt(mx.maximum(mx.abs(gate), 1e-6)) * mx.sign(gate)
        value = mx.sigmoid(gate) * self.value_proj(found)[..., None, :]
        if mask is not None:
            value = mx.where(mask[..., None, None], value, 0)
        whole = with_past(self.norm_conv(value).flatten(-2), (own.kernel - 1) * own.longest, mask, cache, 1)
        y: Any = 0.0
        for tap in range(own.kernel):
            start = tap * own.longest
            y = y + whole[:, start : start + L] * self.conv1d.weight[:, tap, 0]
        if cache is not None:
            cache.advance(L)
        return value + mx.unflatten(nn.silu(y), -1, (N, D)).astype(value.dtype)

    def _look_up(self, state: ForwardState, mask: mx.array | None, cache: Any, dtype: mx.Dtype) -> mx.array:
        """The embeddings [B, L, width] of the n-grams that end with each token."""
        own, L = self._spec, state.inputs.shape[1]
        # A hash is a product of 63 bits; tokens before the first count as the boundary, which is 0 here.
        ids = state.inputs.astype(mx.int64) - self._boundary
        whole = with_past(ids[..., None], own.longest - 1, mask, cache, 0)[..., 0] + self._boundary
        reach = own.longest - 1
        mixed = whole[:, reach:] * self._factors[0]
        connected, rows, first = mx.array(True), [], 0
        for distance in range(1, own.longest):
            before = whole[:, reach - distance : reach - distance + L]
            connected = connected & (before != self._boundary)
            mixed = mx.bitwise_xor(
                mixed, mx.where(connected, before, self._boundary) * self._factors[distance]
            )
            for i in range(own.hashes):
                size = self._sizes[(distance - 1) * own.hashes + i]
                rows.append(mixed % size + first)
                first += size
        table = self.ple_embedding.ngram_embedding
        return look_up(table, mx.stack(rows, axis=-1), dtype).flatten(-2)

    def make_cache(self) -> ArraysCache:
        """The last n - 1 token ids, and the convolution's last inputs."""
        return ArraysCache(size=2)


@hookimpl
def register_injections() -> dict[str, Any]:
    """The injection `ngram_values`."""
    return {"ngram_values": NgramValues}
