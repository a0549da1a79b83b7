"""A usual decoder layer for one token on the CPU: one call, or one trip to MLX, which is the cache's write.

A matrix whose kernel is decided multiplies in memory. Any other is called as the module that it is, so
adapters and every storage format work. A layer whose spec has more than this file knows stays in MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.dispatch import policy
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.kernels.cpu import stacks, start
from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.decode.whole_layer import Shape, whole_layer
from mlx_experts.engine.layers.linear import NarrowError, OnRow, on_row
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm, find

LayerCall = Callable[[mx.array, Any, Any], mx.array]
# Cosines and sines of a position, and whether neighbours are turned together.
_Turn = tuple[np.ndarray, np.ndarray, bool]

_NOTHING = np.empty(0, np.float32)
_UNTURNED: _Turn = (_NOTHING, _NOTHING, False)
_FLOAT32, _KINDS = mx.float32, (nn.RMSNorm, ZeroCentredRMSNorm)
_PARALLEL_FROM = 1 << 18  # products of a call of attention from which on all threads share the heads


def _norm(module: Any) -> tuple[nn.Module, np.float32, np.float32] | None:
    """A root-mean-square norm with its centre and epsilon, or None for any other module."""
    if type(module) not in _KINDS:
        return None
    return module, np.float32(type(module) is ZeroCentredRMSNorm), np.float32(module.eps)


@lru_cache(maxsize=1)
def _no_norm() -> Any:
    """What stands for the norm of heads where there is none: it has no weights."""
    return {"weight": mx.zeros((0,))}, np.float32(0), np.float32(0)


def norm_row(module: Any) -> OnRow | None:
    """A root-mean-square norm on the CPU for a float32 row [1, D] in memory; None for any other module.

    The function says None on a machine that cannot run it.
    """
    found = _norm(module)
    if found is None:
        return None
    held, centre, eps = found

    def run(row: np.ndarray) -> np.ndarray | None:
        token, out = _compiled(), np.empty(row.shape, np.float32)
        if token is None:
            return None
        token.rms_norm(row, None, stacks.float32(held["weight"]), centre, eps, out)
        return out

    return run


def _usual_attention(mixer: Any) -> bool:
    """Whether a mixer is grouped-query attention with nothing beside norms of heads and a fixed rotation."""
    if type(mixer) is not Attention:
        return False
    spec, rope = mixer._spec, mixer._rope
    qk = spec.qk_norm if spec.qk_norm is not None and spec.qk_norm.enabled else None
    return (
        spec.names.qkv is None
        and mixer.owns_kv
        and not (mixer.reuses_kv or mixer._gated or spec.share_kv_every or spec.reuse_kv_last)
        and not (spec.values_from_keys or spec.value_norm or spec.chunk)
        and spec.value_scale == 1.0
        and spec.clip is None
        and mixer.window is None
        and not (spec.sinks is not None and spec.sinks_enabled)
        and not (spec.temperature is not None and spec.temperature.enabled)
        and (qk is None or (qk.over == "head" and not qk.after_rope and bool(qk.weight)))
        and (rope is None or rope.fixed is not None)
    )


@dataclass(frozen=True, eq=False)
class OneToken:
    """A layer's call, with its form for one token in memory.

    Args:
        usual: the call in MLX, for any input.
        on_row: an input, or one float32 row [1, D] in memory, and the layer's cache, to the row behind the
            layer; None, with the cache as it was, where ``usual`` has to be called.
    """

    usual: LayerCall
    on_row: Callable[[mx.array | np.ndarray, Any], np.ndarray | None]

    def __call__(self, x: mx.array, state: Any, cache: Any) -> mx.array:
        """The layer's output for any input."""
        behind = self.on_row(x, cache)
        return self.usual(x, state, cache) if behind is None else mx.array(behind[None])


def one_token(
    pre_mixer: Any,
    mixer: Any,
    pre_mlp: Any,
    feed: Callable[[mx.array], mx.array],
    usual: LayerCall,
    fused: bool | None,
    feed_row: OnRow | None,
) -> LayerCall:
    """``usual``, or an :class:`OneToken`: ``h = x + mixer(pre_mixer(x))`` and ``h + feed(pre_mlp(h))``.

    One row in float32 with a plain cache is computed in memory; such a call asks for all that it needs in one
    function, because Python's own calls are a good part of a token's time.

    Args:
        usual: the same in MLX, for any call.
        fused: the argument of ``load``; None leaves the choice to the environment.
        feed_row: as ``feed`` for a row in memory; None, or one that says None, where ``feed`` is called.
    """
    first, second = _norm(pre_mixer), _norm(pre_mlp)
    if first is None or second is None or not _usual_attention(mixer):
        return usual
    if current_device() != "cpu" or not policy.resolve("cpu", fused).enabled:
        return usual
    spec, qk = mixer._spec, mixer._spec.qk_norm
    normed = qk is not None and qk.enabled
    head_norms = [_norm(mixer[leaf]) for leaf in mixer._leaves] if normed else [_no_norm(), _no_norm()]
    if None in head_norms:
        return usual
    q_norm: Any = head_norms[0]
    k_norm: Any = head_norms[1]
    q_proj, k_proj, v_proj = (on_row(mixer[leaf]) for leaf in ("q_proj", "k_proj", "v_proj"))
    # What is added to a float32 stream may be narrower.
    output: Any = on_row(find(mixer, spec.names.o), widened=True)
    through_mlx: Any = on_row(feed, widened=True)
    into = through_mlx if feed_row is None else feed_row
    angles, scale = _angles(mixer._rope), np.float32(mixer.scale)
    heads, groups, width, depth = mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.v_head_dim
    key_shape, value_shape = (1, groups, 1, width), (1, groups, 1, depth)
    whole = whole_layer(
        (first, second, q_norm, k_norm),
        (*(mixer[leaf] for leaf in ("q_proj", "k_proj", "v_proj")), find(mixer, spec.names.o)),
        Shape(heads, groups, width, depth, scale),
        feed_row,
    )
    taken = ((1, 1, pre_mixer.weight.shape[-1]), _FLOAT32)
    row, array, empty, write, evaluate = np.ascontiguousarray, mx.array, np.empty, mx.async_eval, mx.eval
    # Arrays in float32 are read where they lie, without a call of Python's.
    rows, floats = {_FLOAT32: row}.get, stacks.float32
    token: Any = None

    def by_parts(x: np.ndarray, turn: _Turn, cache: Any) -> np.ndarray | None:
        """The residual and the normed row behind attention, [2, D], with a call for each part."""
        norm = token.rms_norm
        h = empty(x.shape, np.float32)
        module, centre, eps = first
        weight = module["weight"]
        norm(x, None, rows(weight.dtype, floats)(weight), centre, eps, h)
        try:
            k, v = k_proj(h), v_proj(h)
        except NarrowError:
            return None
        keys = empty((groups, width), np.float32)
        module, centre, eps = k_norm
        weight = module["weight"]
        scales = rows(weight.dtype, floats)(weight)
        token.turned(k.reshape(keys.shape), scales, centre, eps, *turn, keys)
        cache.update_and_fetch(array(keys.reshape(key_shape)), array(v.reshape(value_shape)))
        # MLX writes on a thread of its own while the queries are computed.
        write(cache.keys, cache.values)
        try:
            q, queries = q_proj(h), empty((heads, width), np.float32)
        except NarrowError:
            cache.trim(1)
            return None
        finally:
            evaluate(cache.keys, cache.values)
        module, centre, eps = q_norm
        weight = module["weight"]
        scales = rows(weight.dtype, floats)(weight)
        token.turned(q.reshape(queries.shape), scales, centre, eps, *turn, queries)
        seen = _attended(token.attend, queries, cache, scale, empty((heads, depth), np.float32))
        module, centre, eps = second
        weight, both = module["weight"], empty((2, x.shape[1]), np.float32)
        scales = rows(weight.dtype, floats)(weight)
        norm(x, output(seen.reshape(1, -1)), scales, centre, eps, both[1:], both[:1])
        return both

    def run(x: mx.array | np.ndarray, cache: Any) -> np.ndarray | None:
        nonlocal token
        if type(cache) is not KVCache:
            return None
        if not isinstance(x, np.ndarray):
            if (x.shape, x.dtype) != taken or current_device() != "cpu" or not stacks.evaluated(x):
                return None
            x = row(x).reshape(1, -1)
        if token is None:
            token = _compiled()
            if token is None:
                return None
        turn = angles(cache.offset)
        both = None if whole is None else whole(x, turn, cache)
        if both is None:
            if cache.keys is not None and cache.keys.dtype != _FLOAT32:
                return None
            both = by_parts(x, turn, cache)
            if both is None:
                return None
        elif len(both) == 1:
            return both
        total, h = both[:1], both[1:]
        try:
            added = into(h)
        except NarrowError:
            added = None
        return total + (through_mlx(h) if added is None else added)

    return OneToken(usual, run)


def _compiled() -> Any:
    """The compiled steps, or None on a machine that cannot run them."""
    if start.unavailable() is not None:
        return None
    from mlx_experts.engine.kernels.cpu import token

    return token


def _angles(rope: Any) -> Callable[[int], _Turn]:
    """Cosines and sines of a position, times the factor on the rotated slice, and how pairs are formed."""
    if rope is None:
        return lambda position: _UNTURNED
    inverse = 1.0 / np.array(rope.fixed.freqs).astype(np.float64)
    return _turns(inverse.tobytes(), float(rope.fixed.factor), bool(rope.traditional))


@lru_cache(maxsize=32)
def _turns(frequencies: bytes, factor: float, pairs: bool) -> Callable[[int], _Turn]:
    """One function for all layers that turn alike: it computes once what they ask for one after another."""
    inverse, last = np.frombuffer(frequencies), (-1, (_NOTHING, _NOTHING, pairs))

    def at(position: int) -> _Turn:
        nonlocal last
        of, turn = last
        if of != position:
            turned = position * inverse
            cos, sin = np.cos(turned) * factor, np.sin(turned) * factor
            turn = cos.astype(np.float32), sin.astype(np.float32), pairs
            last = position, turn
        return turn

    return at


def _attended(attend: Any, q: np.ndarray, cache: KVCache, scale: np.float32, out: np.ndarray) -> np.ndarray:
    """Attention of ``q`` [h, d] to what the cache holds now."""
    keys, values = np.ascontiguousarray(cache.keys)[0], np.ascontiguousarray(cache.values)[0]
    large = q.size * cache.offset >= _PARALLEL_FROM
    start.run(attend, large, q, keys, values, cache.offset, scale, out)
    return out
