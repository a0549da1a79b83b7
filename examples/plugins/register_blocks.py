"""A decoder layer of its own: both branches are halved before they are added.

`parts()` gives the norms, the mixer and the MLP that the spec has, bound to what stands in the tree now.
`bind` makes one function of them, which is called for every token until a part is replaced.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_block
architectures: [ExampleBlockForCausalLM]
reference: examples/plugins/register_blocks.py
attention: {rope: half}
block: {kind: halved}
moe:
  router: {score: softmax, renormalize: true}
head: {tied: false}
"""


class HalvedLayer(DecoderLayer):
    def bind(self) -> Callable[[mx.array, Any, Any], mx.array]:
        parts = self.parts()

        def run(x: mx.array, state: Any, cache: Any) -> mx.array:
            x = x + 0.5 * parts.mixer(parts.pre_mixer(x), state, cache)
            return x + 0.5 * parts.feed(parts.pre_mlp(x))

        return run


@hookimpl
def register_blocks() -> dict[str, Any]:
    return {"halved": HalvedLayer}
