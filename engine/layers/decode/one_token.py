"""A usual decoder layer for one token on the CPU, with one trip to MLX: the cache's write.

Matrices are called as the modules that they are, so adapters and every storage format work. A layer whose
spec has more than this file knows keeps its steps in MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_experts.engine.dispatch import policy
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.kernels.cpu import stacks, start
from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.module_tree import ZeroCentredRMSNorm, find

LayerCall = Callable[[mx.array, Any, Any], mx.array]

_FLOAT32, _KINDS = mx.float32, (nn.RMSNorm, ZeroCentredRMSNorm)
_PARALLEL_FROM = 1 << 18  # products of a call of attention from which on all threads share the heads


def _norm(module: Any) -> tuple[nn.Module, np.float32, np.float32] | None:
    """A root-mean-square norm with its centre and epsilon, or None for any other module."""
    if type(module) not in _KINDS:
        return None
    return module, np.float32(type(module) is ZeroCentredRMSNorm), np.float32(module.eps)


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


def one_token(
    pre_mixer: Any,
    mixer: Any,
    pre_mlp: Any,
    feed: Callable[[mx.array], mx.array],
    usual: LayerCall,
    fused: bool | None,
) -> LayerCall:
    """``usual``, or ``h = x + mixer(pre_mixer(x))``, ``h + feed(pre_mlp(h))`` in memory for what fits it.

    It fits one row in float32 with a plain cache; each such call asks for all that it needs in one function,
    because Python's own calls are a good part of a token's time.

    Args:
        usual: the same in MLX, for any call.
        fused: the argument of ``load``; None leaves the choice to the environment.
    """
    first, second = _norm(pre_mixer), _norm(pre_mlp)
    if first is None or second is None or not _usual_attention(mixer):
        return usual
    if current_device() != "cpu" or not policy.resolve("cpu", fused).enabled:
        return usual
    spec, qk = mixer._spec, mixer._spec.qk_norm
    normed = qk is not None and qk.enabled
    head_norms = [_norm(mixer[leaf]) for leaf in mixer._leaves] if normed else [None, None]
    if normed and None in head_norms:
        return usual
    q_norm: Any = head_norms[0]
    k_norm: Any = head_norms[1]
    q_proj, k_proj, v_proj = (mixer[leaf] for leaf in ("q_proj", "k_proj", "v_proj"))
    output, angles, scale = find(mixer, spec.names.o), _angles(mixer._rope), np.float32(mixer.scale)
    heads, groups, width, depth = mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.v_head_dim
    key_shape, value_shape, seen_shape = (1, groups, 1, width), (1, groups, 1, depth), (1, 1, heads * depth)
    taken = ((1, 1, pre_mixer.weight.shape[-1]), _FLOAT32, KVCache)
    row, array, empty, evaluate = np.ascontiguousarray, mx.array, np.empty, mx.eval
    # Arrays in float32 are read where they lie, without a call of Python's.
    rows, floats, only = {_FLOAT32: row}.get, stacks.float32, {_FLOAT32}
    token: Any = None
    ready: Callable[[mx.array], bool] = _never

    def begin(x: mx.array) -> bool:
        nonlocal token, ready
        token = _compiled()
        ready = stacks.evaluated if token is not None else _never
        return ready(x)

    ready = begin

    def run(x: mx.array, state: Any, cache: Any) -> mx.array:
        shape = x.shape
        if (shape, x.dtype, type(cache)) != taken:
            return usual(x, state, cache)
        kept = cache.keys
        if (kept is not None and kept.dtype != _FLOAT32) or not ready(x):
            return usual(x, state, cache)
        norm = token.rms_norm
        before = row(x).reshape(1, -1)
        out = empty(before.shape, np.float32)
        module, centre, eps = first
        weight = module["weight"]
        norm(before, rows(weight.dtype, floats)(weight), centre, eps, out)
        h = array(out.reshape(shape))
        q, k, v = q_proj(h), k_proj(h), v_proj(h)
        if {q.dtype, k.dtype, v.dtype} != only:
            return usual(x, state, cache)
        evaluate(q, k, v)
        both = empty((heads + groups, width), np.float32)
        queries, keys = both[:heads], both[heads:]
        if normed:
            module, centre, eps = q_norm
            weight = module["weight"]
            norm(row(q).reshape(heads, width), rows(weight.dtype, floats)(weight), centre, eps, queries)
            module, centre, eps = k_norm
            weight = module["weight"]
            norm(row(k).reshape(groups, width), rows(weight.dtype, floats)(weight), centre, eps, keys)
        else:
            queries[:], keys[:] = row(q).reshape(heads, width), row(k).reshape(groups, width)
        if angles is not None:
            token.rotate(both, *angles(cache.offset))
        cache.update_and_fetch(array(keys.reshape(key_shape)), v.reshape(value_shape))
        evaluate(cache.keys, cache.values)
        seen = _attended(token.attend, queries, cache, scale, empty((heads, depth), np.float32))
        branch = output(array(seen.reshape(seen_shape)))
        evaluate(branch)
        total = before + row(branch).reshape(1, -1)
        module, centre, eps = second
        weight, out = module["weight"], empty(before.shape, np.float32)
        norm(total, rows(weight.dtype, floats)(weight), centre, eps, out)
        added = feed(array(out.reshape(shape)))
        evaluate(added)
        return array((total + row(added).reshape(1, -1)).reshape(shape))

    return run


def _never(x: mx.array) -> bool:
    return False


def _compiled() -> Any:
    """The compiled steps, or None on a machine that cannot run them."""
    if start.unavailable() is not None:
        return None
    from mlx_experts.engine.kernels.cpu import token

    start.warmed()
    return token


def _angles(rope: Any) -> Callable[[int], tuple[np.ndarray, np.ndarray, bool]] | None:
    """Cosines and sines of a position, times the factor on the rotated slice, and how pairs are formed."""
    if rope is None:
        return None
    inverse, factor = 1.0 / np.array(rope.fixed.freqs).astype(np.float64), rope.fixed.factor
    pairs = bool(rope.traditional)

    def at(position: int) -> tuple[np.ndarray, np.ndarray, bool]:
        turned = position * inverse
        cos, sin = np.cos(turned) * factor, np.sin(turned) * factor
        return cos.astype(np.float32), sin.astype(np.float32), pairs

    return at


def _attended(attend: Any, q: np.ndarray, cache: KVCache, scale: np.float32, out: np.ndarray) -> np.ndarray:
    """Attention of ``q`` [h, d] to what the cache holds now."""
    keys, values = np.ascontiguousarray(cache.keys)[0], np.ascontiguousarray(cache.values)[0]
    large = q.size * cache.offset >= _PARALLEL_FROM
    start.run(attend, large, q, keys, values, cache.offset, scale, out)
    return out
