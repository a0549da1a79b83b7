"""A router that reads the token ids: a token's number says which experts it gets, its logits say how much.

A router that reads more than a layer's input needs the decoder layer `residual`, which passes the state on.
"""

from typing import Any

import mlx.core as mx

from mlx_experts.engine.layers.routers.base import Routed, Routing, StatefulRouter
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_router
architectures: [ExampleRouterForCausalLM]
reference: examples/plugins/register_routers.py
attention: {rope: half}
block:
  kind: residual
  options:
    residual: {kind: plain}
moe:
  router: {kind: by_token, score: softmax}
head: {tied: false}
"""


class ByToken(StatefulRouter):
    def route(self, moe: Any) -> Routing:
        logits_of, experts, top_k = self.bind(moe).logits, self.layer.sizes.num_experts, self.top_k

        def routed(x: mx.array, state: Any) -> Routed:
            indices = (state.inputs[..., None] + mx.arange(top_k)) % experts
            weights = mx.take_along_axis(logits_of(x).astype(mx.float32), indices, axis=-1)
            return Routed(indices, mx.softmax(weights, axis=-1))

        return routed


@hookimpl
def register_routers() -> dict[str, Any]:
    return {"by_token": ByToken}
