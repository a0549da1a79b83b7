"""A token embedding with a learned factor for each dimension.

`as_linear` is asked for where a head is tied to the embedding.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_embedding
architectures: [ExampleEmbeddingForCausalLM]
reference: examples/plugins/register_embeddings.py
embedding: {kind: scaled_rows}
attention: {rope: half}
moe:
  router: {score: softmax, renormalize: true}
head: {tied: false}
"""


class ScaledRows(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(plan.sizes.vocab_size, plan.sizes.hidden_size)
        self.factor = mx.ones((plan.sizes.hidden_size,))

    def __call__(self, inputs: mx.array, state: Any, cache: Any = None) -> mx.array:
        return self.rows(inputs) * self.factor

    def as_linear(self, h: mx.array) -> mx.array:
        return self.rows.as_linear(h * self.factor)

    def make_cache(self) -> None:
        return None


@hookimpl
def register_embeddings() -> dict[str, Any]:
    return {"scaled_rows": ScaledRows}
