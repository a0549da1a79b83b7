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

# A layer's call for one token, or None where it leaves the call to MLX.
OneToken = Callable[[mx.array, Any], "mx.array | None"]

_NOTHING = np.empty(0, np.float32)
_PARALLEL_FROM = 1 << 18  # products of a call of attention from which on all threads share the heads


class _Norm:
    """A root-mean-square norm on rows in memory.

    Args:
        module: ``nn.RMSNorm`` or the zero-centred one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._eps = module, np.float32(module.eps)
        self._centre = np.float32(1.0 if type(module) is ZeroCentredRMSNorm else 0.0)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """``x`` [R, D] normalised."""
        from mlx_experts.engine.kernels.cpu import token

        weight, out = stacks.float32(self._module["weight"]), np.empty_like(x)
        token.rms_norm(x, weight, self._centre, self._eps, out)
        return out


def _norm(module: Any) -> _Norm | None:
    return _Norm(module) if type(module) in (nn.RMSNorm, ZeroCentredRMSNorm) else None


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
    pre_mixer: Any, mixer: Any, pre_mlp: Any, feed: Callable[[mx.array], mx.array], fused: bool | None
) -> OneToken | None:
    """The call of ``h = x + mixer(pre_mixer(x))``, ``h + feed(pre_mlp(h))`` for one token, or None.

    Args:
        fused: the argument of ``load``; None leaves the choice to the environment.
    """
    first, second = _norm(pre_mixer), _norm(pre_mlp)
    if first is None or second is None or not _usual_attention(mixer):
        return None
    if current_device() != "cpu" or not policy.resolve("cpu", fused).enabled:
        return None
    spec, qk = mixer._spec, mixer._spec.qk_norm
    projections = [mixer[leaf] for leaf in ("q_proj", "k_proj", "v_proj")]
    output = find(mixer, spec.names.o)
    normed = qk is not None and qk.enabled
    norms = [_norm(mixer[leaf]) for leaf in mixer._leaves] if normed else [None, None]
    if normed and None in norms:
        return None
    heads, groups, width, depth = mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.v_head_dim
    scale, angles = np.float32(mixer.scale), _angles(mixer._rope)

    def run(x: mx.array, cache: Any) -> mx.array | None:
        kept = cache.keys
        if kept is not None and (kept.dtype != mx.float32 or kept.shape[0] != 1):
            return None
        if start.unavailable() is not None or not stacks.evaluated(x):
            return None
        row = stacks.rows_of(x)
        rows = _values(x.shape, projections, first(row))
        if rows is None:
            return None
        q, k, v = (t.reshape(n, -1) for t, n in zip(rows, (heads, groups, groups), strict=True))
        q, k = (t.copy() if n is None else n(t) for t, n in zip((q, k), norms, strict=True))
        if angles is not None:
            from mlx_experts.engine.kernels.cpu import token

            for turned in (q, k):
                token.rotate(turned, *angles(cache.offset))
        cache.update_and_fetch(
            mx.array(k.reshape(1, groups, 1, width)), mx.array(v.reshape(1, groups, 1, depth))
        )
        mx.eval(cache.keys, cache.values)
        seen = _attended(q, cache, scale, np.empty((heads, depth), np.float32))
        branch = output(mx.array(seen.reshape(1, 1, -1)))
        mx.eval(branch)
        total = row + stacks.rows_of(branch)
        added = feed(mx.array(second(total).reshape(x.shape)))
        mx.eval(added)
        return mx.array((total + stacks.rows_of(added)).reshape(x.shape))

    return run


def _values(shape: tuple[int, ...], modules: list[nn.Module], row: np.ndarray) -> list[np.ndarray] | None:
    """What modules make of a row; None where one is not float32."""
    h = mx.array(row.reshape(shape))
    made = [module(h) for module in modules]
    if any(y.dtype != mx.float32 for y in made):
        return None
    mx.eval(made)
    return [stacks.rows_of(y) for y in made]


def _angles(rope: Any) -> Callable[[int], tuple[np.ndarray, np.ndarray, bool]] | None:
    """Cosines and sines of a position, times the factor on the rotated slice, and how pairs are formed."""
    if rope is None:
        return None
    inverse, factor = 1.0 / np.array(rope.fixed.freqs).astype(np.float64), rope.fixed.factor

    def at(position: int) -> tuple[np.ndarray, np.ndarray, bool]:
        turned = position * inverse
        cos, sin = (f(turned) * factor for f in (np.cos, np.sin))
        return cos.astype(np.float32), sin.astype(np.float32), bool(rope.traditional)

    return at


def _attended(q: np.ndarray, cache: KVCache, scale: np.float32, out: np.ndarray) -> np.ndarray:
    """Attention of ``q`` [h, d] to what the cache holds now."""
    from mlx_experts.engine.kernels.cpu import token

    keys, values = (np.ascontiguousarray(np.array(t, copy=False)[0]) for t in (cache.keys, cache.values))
    large = q.size * cache.offset >= _PARALLEL_FROM
    start.run(token.attend, large, q, keys, values, cache.offset, scale, out)
    return out
