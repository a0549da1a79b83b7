"""A second, narrow embedding with a part for each layer (Gemma 3n's per-layer embeddings).

Legend: B batch, L tokens, D model width, N layers, P width of a layer's part.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.module_tree import look_up, make_norm
from mlx_experts.registry.resolve.planner import Plan


class LayerInputs:
    """Builds the leaves inside the decoder and computes every layer's part with them.

    A plain object, because its leaves live in the decoder under the names that checkpoints use.

    Args:
        plan: the model's plan, whose embedding has `layer_inputs` of a width above 0.
    """

    def __init__(self, plan: Plan) -> None:
        spec = plan.embedding.layer_inputs
        assert spec is not None
        self.plan, self.width = plan, spec.width
        self.rows = spec.vocab_size if spec.vocab_size is not None else plan.sizes.vocab_size

    def build(self, decoder: nn.Module) -> None:
        """Place the leaves in ``decoder``."""
        sizes = self.plan.sizes
        packed = sizes.num_layers * self.width
        decoder.embed_tokens_per_layer = nn.Embedding(self.rows, packed)
        decoder.per_layer_model_projection = nn.Linear(sizes.hidden_size, packed, bias=False)
        decoder.per_layer_projection_norm = make_norm(self.plan.norm, self.width, sizes.norm_eps)

    def __call__(self, decoder: nn.Module, ids: mx.array, h: mx.array) -> mx.array:
        """Token ids [B, L] and embeddings [B, L, D] to [B, L, N, P].

        The source is transformers' ``models/gemma4/modeling_gemma4.py`` (project_per_layer_inputs).
        """
        parts = (self.plan.sizes.num_layers, self.width)
        token = mx.unflatten(look_up(decoder.embed_tokens_per_layer, ids, h.dtype), -1, parts)
        context = decoder.per_layer_model_projection(h) * h.shape[-1] ** -0.5
        context = decoder.per_layer_projection_norm(mx.unflatten(context, -1, parts))
        return (context + token * mx.array(self.width**0.5, token.dtype)) * 2.0**-0.5
