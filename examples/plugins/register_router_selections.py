"""A selection that gives the best experts equal weights."""

from typing import Any

import mlx.core as mx

from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_selection
architectures: [ExampleSelectionForCausalLM]
reference: examples/plugins/register_router_selections.py
attention: {rope: half}
moe:
  router: {select: equal_shares, score: softmax}
head: {tied: false}
"""


def equal_shares(*, logits: mx.array, top_k: int, options: Any) -> tuple[mx.array, mx.array]:
    indices = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[..., :top_k]
    return indices, mx.full(indices.shape, 1.0 / top_k, dtype=mx.float32)


@hookimpl
def register_router_selections() -> dict[str, Any]:
    return {"equal_shares": equal_shares}
