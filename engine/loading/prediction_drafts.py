"""Drafts by a model's own prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import trim_prompt_cache

from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.registry.errors import SettingError


class PredictionDrafter:
    """A model's prediction layer as a drafter of its own text.

    The layer reads the model's hidden state at a token and the token after it, and guesses the next. For a
    second guess it reads its own hidden state and its first guess, as SGLang's speculative decoding does.

    Args:
        model: a model that was loaded with ``mtp=True``.

    Raises:
        SettingError: it has no prediction layer.
    """

    def __init__(self, model: LanguageModel) -> None:
        if not model.predicts:
            raise SettingError(
                "the model has no prediction layer to draft with",
                expected="a model that was loaded with mtp=True",
            )
        self.model = model
        self.cache: list[Any] = [model.make_prediction_cache()]
        self._guess: mx.array | None = None
        self._hidden: mx.array | None = None

    def begin(self, prompt: mx.array, hidden: mx.array | None) -> None:
        """Read the prompt but for its last token, whose hidden state nobody knows yet."""
        if hidden is not None:
            self._read(prompt[1:], hidden)
            mx.eval([each.state for each in self.cache])
        self._guess = None

    def draft(self, count: int) -> mx.array:
        """At most ``count`` guesses; none before the model has read the last token."""
        if self._guess is None:
            return mx.array([], mx.uint32)
        assert self._hidden is not None
        guesses, hidden = [self._guess], self._hidden
        for _ in range(count - 1):
            hidden, logits = self.model.predict(guesses[-1][None], hidden, self.cache[0])
            guesses.append(mx.argmax(logits[:, -1], axis=-1).astype(mx.uint32))
        return mx.concatenate(guesses)

    def confirm(self, tokens: Sequence[int], drafted: int, hidden: mx.array | None) -> None:
        """Forget what was read of guesses, and read what the model said with its hidden states."""
        assert hidden is not None
        trim_prompt_cache(self.cache, max(drafted - 1, 0))
        states, logits = self._read(mx.array(list(tokens), mx.uint32), hidden)
        self._hidden = states[:, -1:]
        self._guess = mx.argmax(logits[:, -1], axis=-1).astype(mx.uint32)
        mx.async_eval(self._guess, self._hidden)

    def settle(self, dropped: int) -> None:
        """Nothing: its cache is nobody else's."""

    def _read(self, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        found: tuple[mx.array, mx.array] = self.model.predict(tokens[None], hidden[None], self.cache[0])
        return found
