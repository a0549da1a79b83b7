"""What the pieces of a layer compute, in float64 NumPy and by the plainest formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels import naive
from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.kernels.gpu.pieces.head_product import HeadProduct
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Norm, Product, RowProduct


def wide(array: mx.array) -> np.ndarray:
    """An array of any float or integer type as float64."""
    if mx.issubdtype(array.dtype, mx.floating):
        array = array.astype(mx.float32)
    return np.array(array).astype(np.float64)


def rms_norm(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    """Over the last axis."""
    if norm is None:
        return x
    scale = 1.0 if norm.weight is None else wide(norm.weight) + norm.offset
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps) * scale


def turned(x: np.ndarray, heads: Heads, position: int, inverse: np.ndarray | None) -> np.ndarray:
    """Some values of each head ``[heads, D]`` rotated."""
    turn = heads.turn
    if turn is None:
        return x
    assert inverse is not None
    angles = position * inverse
    before, front, rest = np.split(x, [turn.first, turn.first + turn.dims], axis=-1)
    front = front * turn.factor
    half = turn.dims // 2
    a, b = (front[:, ::2], front[:, 1::2]) if turn.interleaved else (front[:, :half], front[:, half:])
    pair = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    front = (
        np.stack(pair, axis=-1).reshape(front.shape) if turn.interleaved else np.concatenate(pair, axis=-1)
    )
    return np.concatenate([before, front, rest], axis=-1)


def each_head(
    row: np.ndarray, heads: Heads, position: int = 0, inverse: np.ndarray | None = None
) -> np.ndarray:
    """Norm and rotation of the heads of one row."""
    if heads.whole:
        row = rms_norm(row, heads.norm)
    split = row.reshape(-1, heads.width)
    norm = None if heads.whole else heads.norm
    if not heads.late:
        split = rms_norm(split, norm)
    split = turned(split, heads, position, inverse)
    return (rms_norm(split, norm) if heads.late else split).reshape(-1)


def product(p: Product, x: np.ndarray) -> np.ndarray:
    """One matrix times the row, with its bias, clamp, factor and cap."""
    y = wide(naive.dequantised(p.stack, 0)) @ x
    if p.stack.bias is not None:
        y = y + wide(p.stack.bias)[p.stack.first : p.stack.first + p.rows]
    y = p.factor * (y if p.clip is None else np.clip(y, -p.clip, p.clip))
    return p.softcap * np.tanh(y / p.softcap) if p.softcap else y


def row_before(asked: RowProduct, token: dict[str, mx.array]) -> tuple[np.ndarray, np.ndarray]:
    """The row that the matrices meet, and the sum of the two rows it came from."""
    x = wide(token["x"]).reshape(-1)
    if asked.added is not None:
        x = x + asked.added * wide(token["branch"]).reshape(-1)
    stream = x
    if asked.gate is not None:
        gate = np.repeat(wide(token["gate"]).reshape(-1), asked.gate_width)
        x = x * (1 / (1 + np.exp(-gate)) if asked.gate == "sigmoid" else np.logaddexp(0, gate))
    return rms_norm(x, asked.norm), stream


def row_product(asked: RowProduct, token: dict[str, mx.array]) -> dict[str, np.ndarray]:
    """Every output by name."""
    x, stream = row_before(asked, token)
    out: dict[str, np.ndarray] = {}
    for i, p in enumerate(asked.products):
        y = product(p, x)
        if asked.residual and i == 0:
            y = wide(token["residual"]).reshape(-1) + asked.multiplier * y
        if p.packed:
            assert p.heads is not None
            pairs = y.reshape(-1, 2, p.heads.width)
            y, out[f"g{i}"] = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
        if p.heads is not None:
            inverse = p.heads.turn.inverse if p.heads.turn is not None else None
            inverse = token.get("inverse", inverse)
            position = int(np.array(token["offset"])[0]) if "offset" in token else 0
            y = each_head(y, p.heads, position, None if inverse is None else wide(inverse))
        out[f"y{i}"] = y
    if asked.added is not None:
        out["stream"] = stream
    return out


def head_product(asked: HeadProduct, x: mx.array) -> np.ndarray:
    """Each head's part of a row times its own matrix."""
    parts = wide(x).reshape(asked.heads, asked.pitch)[:, : asked.stack.projection.cols]
    made = [wide(naive.dequantised(asked.stack, head)) @ part for head, part in enumerate(parts)]
    return np.concatenate(made)


def delta_step(step: DeltaStep, token: dict[str, mx.array]) -> dict[str, np.ndarray]:
    """Every output by name: a gated delta net's token, value head by value head."""
    g, h, dk, dv = step.key_heads, step.value_heads, step.key_dim, step.value_dim
    ratio = h // g
    rows = [wide(token[f"r{i}"]).reshape(-1) for i in range(step.rows)]
    if step.by_key_head:
        q, k, v, z = np.split(rows[0].reshape(g, -1), np.cumsum([dk, dk, ratio * dv]), axis=-1)
        b, a = np.split(rows[1].reshape(g, -1), 2, axis=-1)
        now = np.concatenate([q.reshape(-1), k.reshape(-1), v.reshape(-1)])
    else:
        now, z, b, a = rows
    z, b, a = z.reshape(h, dv), b.reshape(-1), a.reshape(-1)
    taken = np.concatenate([wide(token["past"])[0], now[None]])
    mixed = (taken * wide(step.conv)[:, :, 0].T).sum(axis=0)
    mixed = mixed / (1 + np.exp(-mixed))
    q, k = (mixed[i * g * dk : (i + 1) * g * dk].reshape(g, dk) for i in range(2))
    v = mixed[2 * g * dk :].reshape(h, dv)
    q, k = (x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    memory, out = wide(token["memory"])[0].copy(), np.zeros((h, dv))
    for head in range(h):
        key, query = k[head // ratio], q[head // ratio] / np.sqrt(dk)
        rate = np.exp(wide(step.decay)[head]) * np.logaddexp(0, a[head] + wide(step.shift)[head])
        memory[head] *= np.exp(-rate)
        beta = 1 / (1 + np.exp(-b[head]))
        memory[head] += np.outer(beta * (v[head] - memory[head] @ key), key)
        out[head] = memory[head] @ query
    gate = 1 / (1 + np.exp(-z)) * (z if step.gate == "silu" else 1)
    y = rms_norm(out, Norm(step.norm, step.eps)) * gate
    return {"y": y.reshape(-1), "new_past": taken[1:].reshape(-1), "new_memory": memory.reshape(-1)}


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Relative root mean square distance; NaN in either makes it NaN."""
    return float(np.linalg.norm(np.asarray(got).reshape(-1) - want) / np.linalg.norm(want))
