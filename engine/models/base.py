"""What loading, saving, inspecting and checking ask of a model, whoever wrote its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.weights.conversion import Converted, WeightConverter
from mlx_experts.registry.resolve.planner import Plan


class LanguageModel(nn.Module):
    """A model that a plan describes, with the interface of mlx-lm's models."""

    if TYPE_CHECKING:
        cast_predicate: Any

        @property
        def layers(self) -> list[Any]:
            """The decoder layers."""

        def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
            """Token ids ``[B, L]`` to logits ``[B, L, vocabulary]``."""

        def make_cache(self) -> list[Any]:
            """The caches of the layers that keep anything."""

    @property
    def plan(self) -> Plan:
        """What the model was built from."""
        raise NotImplementedError

    @property
    def converter(self) -> WeightConverter:
        """What carries checkpoints into this model's parameters."""
        raise NotImplementedError

    @property
    def remarks(self) -> list[str]:
        """What a person should know of how the model was built."""
        return []

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Carry a checkpoint's tensors to this model's parameter names.

        Raises:
            TensorError: as :meth:`carry` does, or experts are missing: a caller may load leniently.
        """
        tensors = self.convert(weights).tensors
        self.converter.check_experts(tensors)
        return tensors

    def convert(self, weights: Mapping[str, mx.array], *, compare_values: bool = True) -> Converted:
        """As :meth:`sanitize`, with the account of what was dropped."""
        return self.converter.load(weights, compare_values=compare_values)
