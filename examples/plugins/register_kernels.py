"""A kernel for the experts, asked before the back-end's own: plain products for float32 weights and one row.

What it accepts is compared with the float32 truth once before it is used. What it declines runs as without
it, and its reason stands in the note of the trace.
"""

from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.request import Accept, Decline
from mlx_experts.plugins.hookspecs import hookimpl


class PlainProducts:
    def gate(self, request: Any, policy: Any) -> Accept | Decline:
        if request.rows != 1:
            return Decline("rows", "1", str(request.rows), "Plain products are for one row.")
        parts = [each for each in (request.gate, request.up, request.down) if each is not None]
        if any(part.format != "plain" for part in parts):
            return Decline("format", "plain", parts[0].format, "Quantised weights have better kernels.")
        return Accept("plain_products")

    def prepare(self, experts: Any, dtype: mx.Dtype) -> Any:
        def product(stack: Any, v: mx.array, picked: mx.array) -> mx.array:
            weights = stack.weight[picked][:, stack.first : stack.first + stack.projection.rows]
            y = (weights.astype(mx.float32) @ v[..., None])[..., 0]
            return y if stack.bias is None else y + stack.bias[picked].astype(mx.float32)

        def run(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
            picked, row = indices.reshape(-1), x.reshape(1, -1).astype(mx.float32)
            gate = None if experts.gate is None else product(experts.gate, row, picked)
            act = activations.apply(experts.activation, gate, product(experts.up, row, picked))
            y = (product(experts.down, act, picked) * weights.reshape(-1, 1)).sum(axis=0)
            return y.reshape(x.shape).astype(x.dtype)

        return run


@hookimpl
def register_kernels() -> dict[str, Any]:
    return {"plain_products": PlainProducts()}
