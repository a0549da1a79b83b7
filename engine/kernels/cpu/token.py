"""What surrounds the matrices of a decoder layer, for one token on the CPU: norms, rotation and attention.

MLX builds each of these from five to fifteen operations on the CPU and hands every one to another thread.
Here each is one call on arrays in memory, in float32. Legend: h query heads, g key-value heads, d head width,
S keys.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from mlx_experts.engine.kernels.cpu.numba_forms import both_forms, kept_on_disk

# Sums may be reordered; infinities and NaNs keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def _rms_norm(x, weight, centre, eps, out):  # type: ignore[no-untyped-def]
    """Each row of ``x`` [R, D] over its root mean square, times ``centre + weight`` (or 1), to ``out``.

    Zhang and Sennrich 2019; ``weight`` [D] is empty where the norm has none.
    """
    for r in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[r, i] * x[r, i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        if weight.size:
            for i in range(x.shape[1]):
                out[r, i] = x[r, i] * factor * (centre + weight[i])
        else:
            for i in range(x.shape[1]):
                out[r, i] = x[r, i] * factor


rms_norm = kept_on_disk(_rms_norm, nogil=True, error_model="numpy", fastmath=_FAST)


def _rotate(x, cos, sin, traditional):  # type: ignore[no-untyped-def]
    """Turn the first values of each row of ``x`` [R, d] in place, by one angle a pair (Su et al. 2021).

    ``traditional`` pairs neighbours; otherwise the two halves of the rotated width are paired.
    """
    half = cos.size
    for r in range(x.shape[0]):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if traditional else (i, i + half)
            a, b = x[r, first], x[r, second]
            x[r, first], x[r, second] = a * cos[i] - b * sin[i], a * sin[i] + b * cos[i]


rotate = kept_on_disk(_rotate, nogil=True, error_model="numpy")


def _attend(q, keys, values, length, scale, out):  # type: ignore[no-untyped-def]
    """Softmax attention of ``q`` [h, d] to the first ``length`` of ``keys`` [g, S, d], ``values`` [g, S, e].

    ``out`` is [h, e]. The softmax is shifted by its largest logit (Vaswani et al. 2017; Ainslie et al. 2023).
    """
    heads, width, depth = q.shape[0], q.shape[1], values.shape[2]
    share = heads // keys.shape[0]
    for head in prange(heads):
        k, v = keys[head // share], values[head // share]
        logits = np.empty(length, np.float32)
        top = np.float32(-math.inf)
        for s in range(length):
            total = np.float32(0)
            for i in range(width):
                total += q[head, i] * k[s, i]
            logits[s] = total * scale
            top = max(top, logits[s])
        row = out[head]
        row[:] = 0
        whole = np.float32(0)
        for s in range(length):
            weight = np.exp(logits[s] - top)
            whole += weight
            for i in range(depth):
                row[i] += weight * v[s, i]
        for i in range(depth):
            row[i] /= whole


attend = both_forms(_attend, fastmath=_FAST)
