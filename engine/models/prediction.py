"""The layer past the last one that guesses the token after the next, beside the decoder it belongs to."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.module_tree import find, look_up, make_norm, place
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import Plan


def build_prediction(layer: nn.Module, plan: Plan) -> None:
    """Give a decoder layer what makes it a prediction layer, under the names of the family's `mtp` section.

    Raises:
        ConfigError: the family's embedding has a state, which guesses would have to share.
    """
    spec, sizes = plan.prediction, plan.sizes
    assert spec is not None
    if plan.embedding.kind != "standard" or plan.embedding.layer_inputs is not None:
        raise ConfigError(
            "a prediction layer needs the standard embedding", where=f"{plan.family.family}.yaml, mtp"
        )
    for name in (spec.embedding_norm, spec.hidden_norm, spec.norm):
        place(layer, name, make_norm(plan.norm, sizes.hidden_size, sizes.norm_eps))
    place(layer, spec.projection, nn.Linear(2 * sizes.hidden_size, sizes.hidden_size, bias=False))


def predict(decoder: Any, plan: Plan, tokens: mx.array, hidden: mx.array, cache: Any) -> mx.array:
    """Hidden states [B, L, D] of guesses, ready for the head.

    Args:
        tokens: the tokens [B, L] after those that ``hidden`` [B, L, D] is of.
        cache: the prediction layer's own cache.
    """
    spec, layer, steps = plan.prediction, decoder.prediction_layer, decoder.steps()
    assert spec is not None
    state = ForwardState(tokens, steps.dtype())
    embedded = look_up(steps.embed, tokens, state.dtype)
    factor = plan.embedding.multiplier
    if factor != 1.0:
        factor = math.sqrt(plan.sizes.hidden_size) if factor == "sqrt_hidden" else factor
        embedded = embedded * mx.array(factor, embedded.dtype)
    halves = [find(layer, spec.embedding_norm)(embedded), find(layer, spec.hidden_norm)(hidden)]
    if spec.order == "hidden_embedding":
        halves.reverse()
    h = find(layer, spec.projection)(mx.concatenate(halves, axis=-1))
    result: mx.array = find(layer, spec.norm)(layer(h, state, cache))
    return result
