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

    # Name of the dtype that the checkpoint computes in; None for a model that no checkpoint has filled.
    stored_dtype: str | None = None

    if TYPE_CHECKING:
        cast_predicate: Any

        @property
        def layers(self) -> list[Any]:
            """The decoder layers."""

        def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
            """Token ids ``[B, L]`` to logits ``[B, L, vocabulary]``."""

        @property
        def predicts(self) -> bool:
            """Whether it has a prediction layer, which ``load(..., mtp=True)`` keeps."""

        def hidden_and_logits(self, inputs: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
            """Hidden states after the final norm, and logits."""

        def predict(self, tokens: mx.array, hidden: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
            """Hidden states and logits of what the prediction layer guesses."""

        def make_prediction_cache(self) -> Any:
            """A fresh cache of the prediction layer."""

        def make_cache(self) -> list[Any]:
            """The caches of the layers that keep anything."""

    @property
    def plan(self) -> Plan:
        """What the model was built from."""
        raise NotImplementedError

    @property
    def converter(self) -> WeightConverter:
        """What converts checkpoints to this model's parameters."""
        raise NotImplementedError

    @property
    def remarks(self) -> list[str]:
        """What a person should know of how the model was built."""
        return []

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Convert a checkpoint's tensors to this model's parameter names.

        Raises:
            TensorError: as :meth:`convert` does, or experts are missing: a caller may load leniently.
        """
        converted = self.convert(weights)
        if converted.own_head:
            self.untie_head()
        self.converter.check_experts(converted.tensors)
        return converted.tensors

    def convert(self, weights: Mapping[str, mx.array], *, values: bool = True) -> Converted:
        """As :meth:`sanitize`, with the counts of what was ignored."""
        kept, ignored = self.converter.ignore(weights)
        converted = self.converter.convert(kept, values=values)
        converted.ignored += ignored
        return converted

    def untie_head(self) -> None:
        """Give a model whose head is tied an output head of its own.

        Raises:
            NotImplementedError: the model's head is never settled here.
        """
        raise NotImplementedError
