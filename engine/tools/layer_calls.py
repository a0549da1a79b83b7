"""Lets the layers of a model be called one by one, as a quantiser of mlx-lm's calls them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.layers.base_mixer import Mixer
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.base import LanguageModel

_ALONE: dict[type[nn.Module], type[nn.Module]] = {}


def call_layers_alone(model: nn.Module) -> None:
    """Give each decoder layer and mixer mlx-lm's form of a call, ``layer(x, mask, cache)``.

    The mask of a call is the causal one in every such tool, which the layer makes itself, with its window.
    A model of mlx-lm's own is left as it is.
    """
    if not isinstance(model, LanguageModel):
        return
    for layer in model.layers:
        for module in (layer, *(each for each in layer.modules() if isinstance(each, Mixer))):
            # The module stays itself, and whatever holds it is called as before.
            kind = type(module)
            if kind not in _ALONE:
                _ALONE[kind] = _alone(kind)
            module.__class__ = _ALONE[kind]


def _alone(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, state: Any = None, cache: Any = None, mask: Any = None) -> Any:
        if isinstance(state, ForwardState):
            return kind.__call__(self, x, state, cache, *(() if mask is None else (mask,)))
        return kind.__call__(self, x, ForwardState(mx.zeros(x.shape[:2], mx.int32), x.dtype), cache)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
