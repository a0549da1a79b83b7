"""Tries the kernels beside the experts' on this device: the router, and the pieces of a layer on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from mlx_experts.engine.kernels import router_kernel
from mlx_experts.engine.kernels.expert_weights import Stack, read_stack
from mlx_experts.engine.kernels.gpu.pieces import (
    delta_step,
    head_product,
    head_turns,
    routing,
    row_product,
    truth,
)
from mlx_experts.engine.kernels.gpu.pieces.delta_step import DeltaStep
from mlx_experts.engine.kernels.gpu.pieces.head_product import HeadProduct
from mlx_experts.engine.kernels.gpu.pieces.packed import PackedValue, Value, laid
from mlx_experts.engine.kernels.gpu.pieces.piece import Piece
from mlx_experts.engine.kernels.gpu.pieces.row_product import Heads, Norm, Product, RowProduct, Turn
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.kernels.router_kernel import RouterSteps

# The sizes of a middling layer: H, heads of queries and of keys, D, experts, experts a token.
_H, _QUERIES, _KEYS, _D, _E, _K = 2048, 16, 4, 128, 64, 8
# A position in the hundreds: float32 angles lose digits in proportion to it, in MLX as here.
_POSITION, _EPS = 300, 1e-6


@dataclass(frozen=True, eq=False)
class Attempt:
    """One kernel on one kind of input.

    Args:
        run: its outputs.
        plain: the same in plain MLX, for the time.
        wanted: the outputs in float64.
    """

    kernel: str
    what: str
    dtype: mx.Dtype
    run: Callable[[], list[mx.array]]
    plain: Callable[[], list[mx.array]]
    wanted: list[np.ndarray]

    def error(self) -> float:
        """The largest relative RMS distance of an output to truth."""
        got = [truth.wide(array).reshape(-1) for array in self.run()]
        return max(truth.distance(g, w.reshape(-1)) for g, w in zip(got, self.wanted, strict=True))


_Make = Callable[[str, Device, mx.Dtype], Attempt | Decline]


def kernels(device: Device) -> tuple[str, ...]:
    """The names of the kernels that a device may have."""
    return tuple(_ON_CPU if device == "cpu" else _ON_GPU)


def shares(kernel: str) -> str:
    """What compiled kernels it shares: plain MLX after a router matrix has the router's own."""
    return _ROUTER if kernel == _ROUTING else kernel


def attempt(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt | Decline:
    """One of ``kernels`` on one kind of input, or why the device has none."""
    mx.random.seed(0)
    return (_ON_CPU if device == "cpu" else _ON_GPU)[kernel](kernel, device, dtype)


def _row(size: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((1, 1, size)).astype(dtype)


def _weight(size: int, dtype: mx.Dtype) -> mx.array:
    return (1 + 0.2 * mx.random.normal((size,))).astype(dtype)


def _matrix(width: int, rows: int, bits: int, dtype: mx.Dtype) -> tuple[nn.QuantizedLinear, Stack]:
    layer = nn.Linear(width, rows, bias=False)
    layer.set_dtype(dtype)
    quantised = nn.QuantizedLinear.from_linear(layer, 64, bits)
    stack = read_stack(quantised, nn.Linear, nn.QuantizedLinear)
    assert stack is not None
    return quantised, stack


def _norm(x: mx.array, norm: Norm) -> mx.array:
    return mx.fast.rms_norm(x, norm.weight, norm.eps)


def _turned(x: mx.array, heads: Heads) -> mx.array:
    assert heads.turn is not None
    freqs = None if heads.turn.inverse is None else 1 / heads.turn.inverse
    return mx.fast.rope(x, _D, traditional=False, base=None, scale=1.0, offset=_POSITION, freqs=freqs)


def _attempt(
    kernel: str,
    what: str,
    dtype: mx.Dtype,
    piece: Piece,
    token: Mapping[str, Value],
    plain: Callable[[], list[mx.array]],
    wanted: dict[str, np.ndarray],
) -> Attempt:
    given = [token[name] for name in piece.tokens]
    return Attempt(kernel, what, dtype, partial(piece, *given), plain, [wanted[n] for n in piece.outputs])


def _router(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt | Decline:
    steps, logits = RouterSteps(_E, _K, normalise="sum"), _row(_E, dtype)
    run = router_kernel.prepare(steps, device)
    if isinstance(run, Decline):
        return run
    scores = np.exp(truth.wide(logits).reshape(-1))
    chosen = np.argsort(-scores, kind="stable")[:_K]

    def routed() -> list[mx.array]:
        made = run(logits, None)
        assert not isinstance(made, Decline)
        return list(made)

    def plain() -> list[mx.array]:
        all_scores = mx.softmax(logits, axis=-1, precise=True)
        indices = mx.argpartition(-all_scores, kth=_K - 1, axis=-1)[..., :_K]
        weights = mx.take_along_axis(all_scores, indices, axis=-1)
        return [indices, weights / weights.sum(axis=-1, keepdims=True)]

    wanted = [chosen.astype(np.float64), scores[chosen] / scores[chosen].sum()]
    return Attempt(kernel, f"{_K} of {_E} experts", dtype, routed, plain, wanted)


def _heads(dtype: mx.Dtype, whole: int = 0) -> Heads:
    inverse = 1.0 / 1e6 ** (mx.arange(0, _D, 2) / _D)
    return Heads(_D, Norm(_weight(whole or _D, dtype), _EPS), Turn(inverse, _D), whole=bool(whole))


def _projections(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt:
    layers = [_matrix(_H, n * _D, 4, dtype) for n in (_QUERIES, _KEYS, _KEYS)]
    q_heads, k_heads = _heads(dtype), _heads(dtype)
    products = tuple(Product(s, h) for (_, s), h in zip(layers, (q_heads, k_heads, None), strict=True))
    asked = RowProduct(_H, products, Norm(_weight(_H, dtype), _EPS))
    piece = row_product.build(asked, row_product.backend_of(device), device, dtype, join=True)
    token = {"x": _row(_H, dtype), "offset": mx.array([_POSITION] * 4, dtype=mx.int32)}

    def plain() -> list[mx.array]:
        assert asked.norm is not None
        x = _norm(token["x"], asked.norm)
        q, k, v = (layer(x).reshape(1, -1, 1, _D) for layer, _ in layers)
        made = []
        for t, heads in ((q, q_heads), (k, k_heads)):
            assert heads.norm is not None
            made.append(_turned(_norm(t, heads.norm), heads))
        return [*made, v]

    wanted = truth.row_product(asked, token)
    return _attempt(kernel, "affine 4-bit", dtype, piece, token, plain, wanted)


def _output(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt:
    layer, stack = _matrix(_QUERIES * _D, _H, 8, dtype)
    asked = RowProduct(_QUERIES * _D, (Product(stack),), residual=True)
    piece = row_product.build(asked, row_product.backend_of(device), device, dtype, join=True)
    token = {"x": _row(_QUERIES * _D, dtype), "residual": _row(_H, dtype)}
    wanted = truth.row_product(asked, token)

    def plain() -> list[mx.array]:
        return [token["residual"] + layer(token["x"])]

    # The residual lies where the projections' launch leaves it.
    left = laid({"before": _row(_D, dtype), "residual": token["residual"]}, device)
    given = {"x": token["x"], "residual": left["residual"]}
    return _attempt(kernel, "affine 8-bit", dtype, piece, given, plain, wanted)


def _turns(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt:
    rows = {"q": (_heads(dtype, _QUERIES * _D), _QUERIES * _D), "k": (_heads(dtype, _KEYS * _D), _KEYS * _D)}
    piece = head_turns.build(rows, row_product.backend_of(device), device, dtype, join=True)
    token = {name: _row(width, dtype) for name, (_, width) in rows.items()}
    token["offset"] = mx.array([_POSITION] * 4, dtype=mx.int32)
    wanted = {}
    for name, (heads, _) in rows.items():
        assert heads.turn is not None
        assert heads.turn.inverse is not None
        row, inverse = truth.wide(token[name]).reshape(-1), truth.wide(heads.turn.inverse)
        wanted[f"out_{name}"] = truth.each_head(row, heads, _POSITION, inverse)

    def plain() -> list[mx.array]:
        made = []
        for name, (heads, _) in rows.items():
            assert heads.norm is not None
            made.append(_turned(_norm(token[name], heads.norm).reshape(1, -1, 1, _D), heads))
        return made

    return _attempt(kernel, "", dtype, piece, token, plain, wanted)


def _latents(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt:
    """A latent of 512 values and a key of 64, which are parts of one row."""
    c, r = 512, 64
    norm, turn = Norm(_weight(c, dtype), _EPS), Turn(1.0 / 1e4 ** (mx.arange(0, r, 2) / r), r, True)
    rows = {"l": (Heads(c, norm), c), "kr": (Heads(r, turn=turn), r)}
    piece = head_turns.build(rows, row_product.backend_of(device), device, dtype, join=True)
    row = _row(c + r, dtype)
    latent, key = row[..., :c], row[..., c:]
    left = laid({"before": _row(_D, dtype), "row": row}, device)["row"]
    assert isinstance(left, PackedValue)
    token: dict[str, Value] = {"l": left.part(0, c), "kr": left.part(c, r)}
    token["offset"] = mx.array([_POSITION] * 4, dtype=mx.int32)
    assert turn.inverse is not None
    wanted = {
        "out_l": truth.each_head(truth.wide(latent).reshape(-1), rows["l"][0]),
        "out_kr": truth.each_head(
            truth.wide(key).reshape(-1), rows["kr"][0], _POSITION, truth.wide(turn.inverse)
        ),
    }

    def plain() -> list[mx.array]:
        assert turn.inverse is not None
        how: Any = {"traditional": True, "base": None, "scale": 1.0, "offset": _POSITION}
        turned = mx.fast.rope(key[:, None], r, freqs=1 / turn.inverse, **how)
        return [_norm(latent[:, None], norm), turned]

    return _attempt(kernel, "", dtype, piece, token, plain, wanted)


def _of_each_head(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt:
    """Queries on their way into a latent of 512 values; 64 rotated ones follow each head's own."""
    layer = MultiLinear(_D, 512, _QUERIES)
    layer.set_dtype(dtype)
    quantised = layer.to_quantized(64, 4)
    stack = read_stack(quantised, MultiLinear, QuantizedMultiLinear)
    assert stack is not None
    asked = HeadProduct(stack, _D + 64)
    piece = head_product.build(asked, row_product.backend_of(device), device, dtype)
    x = mx.random.normal((1, _QUERIES, 1, _D + 64)).astype(dtype)
    wanted = {"y": truth.head_product(asked, x)}
    token = {"x": x}
    return _attempt(kernel, "affine 4-bit", dtype, piece, token, lambda: [quantised(x[..., :_D])], wanted)


def _delta(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt:
    """Half as many key heads as value heads, all 128 wide, and a convolution over four tokens."""
    keys, values, taps = 4, 8, 4
    channels = (2 * keys + values) * _D
    step = DeltaStep(
        key_heads=keys,
        value_heads=values,
        key_dim=_D,
        value_dim=_D,
        kernel=taps,
        by_key_head=False,
        gate="sigmoid",
        eps=_EPS,
        conv=mx.random.normal((channels, taps, 1)).astype(dtype),
        decay=mx.random.normal((values,)),
        shift=mx.random.normal((values,)).astype(dtype),
        norm=_weight(_D, dtype),
    )
    piece = delta_step.build(step, row_product.backend_of(device), device, dtype, join=True)
    widths = (channels, values * _D, values, values)
    token = {f"r{i}": _row(width, dtype) for i, width in enumerate(widths)}
    token["past"] = mx.random.normal((1, taps - 1, channels)).astype(dtype)
    token["memory"] = mx.random.normal((1, values, _D, _D))

    def plain() -> list[mx.array]:
        past = mx.concatenate([token["past"], token["r0"]], axis=1)
        mixed = nn.silu(mx.conv1d(past, step.conv, groups=channels))
        q, k, v = mx.split(mixed, [keys * _D, 2 * keys * _D], axis=-1)
        q, k, v = (t.reshape(1, 1, -1, _D) for t in (q, k, v))
        q, k = normalize_qk(q, k, inv_scale=_D**-0.5, eps=1e-6)
        a, b = token["r3"].astype(mx.float32), token["r2"]
        out, memory = gated_delta_update(q, k, v, a, b, step.decay, step.shift, token["memory"])
        z = token["r1"].reshape(1, 1, values, _D).astype(mx.float32)
        normed = mx.fast.rms_norm(out, step.norm, _EPS).astype(mx.float32)
        return [(normed * mx.sigmoid(z)).astype(dtype).flatten(-2), past[:, 1:], memory]

    wanted = truth.delta_step(step, token)
    return _attempt(kernel, "", dtype, piece, token, plain, wanted)


def _routing(kernel: str, device: Device, dtype: mx.Dtype) -> Attempt | Decline:
    if device != "cuda":
        return Decline("device", "cuda", device, "Metal orders what a launch writes only within a group.")
    layer, stack = _matrix(_H, _E, 8, dtype)
    norm, steps = Norm(_weight(_H, dtype), _EPS), RouterSteps(_E, _K, normalise="sum")
    piece = routing.build(stack, norm, steps, row_product.backend_of(device), dtype, join=True)
    x = _row(_H, dtype)
    asked = RowProduct(_H, (Product(stack),), norm)
    normed, _ = truth.row_before(asked, {"x": x})
    logits = truth.product(asked.products[0], normed)
    chosen = np.argsort(-logits, kind="stable")[:_K]
    scores = np.exp(logits[chosen] - logits.max())
    wanted = {
        "y0": logits,
        "normed": normed,
        "chosen": chosen.astype(np.float64),
        "share": scores / scores.sum(),
    }
    run = router_kernel.prepare(steps, device)
    assert not isinstance(run, Decline)

    def plain() -> list[mx.array]:
        row = _norm(x, norm)
        made = run(layer(row), None)
        assert not isinstance(made, Decline)
        return [row, *made]

    token = {"x": x, "counter": routing.zeros(x)}
    return _attempt(kernel, "affine 8-bit", dtype, piece, token, plain, wanted)


def _none(kernel: str, device: Device, dtype: mx.Dtype) -> Decline:
    return Decline("device", "a GPU", device, "Pieces of a layer run in plain MLX on the CPU.")


_ROUTER, _ROUTING = "router", "norm, router matrix and selection"
_ON_CPU: Mapping[str, _Make] = {_ROUTER: _router, "pieces": _none}
_ON_GPU: Mapping[str, _Make] = {
    _ROUTER: _router,
    "norm, projections and heads": _projections,
    "output and residual": _output,
    "norm over all heads, and heads": _turns,
    "norm of a latent, and its key": _latents,
    "a matrix of each head": _of_each_head,
    "a gated delta net's token": _delta,
    _ROUTING: _routing,
}
