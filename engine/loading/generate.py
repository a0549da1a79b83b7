"""mlx-lm's ways to generate, behind a look at the token ids: past an embedding's rows MLX reads anything."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchResponse, GenerationResponse
from mlx_lm.generate import batch_generate as _batch
from mlx_lm.generate import generate as _whole
from mlx_lm.generate import stream_generate as _stream

from mlx_experts.engine.loading.prompt_caches import unbounded
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.registry.errors import SettingError

_LOG = logging.getLogger("mlx_experts")
Ids = Sequence[int] | mx.array


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | Ids, verbose: bool = False, **options: Any
) -> str:
    """Generate a whole answer, as ``mlx_lm.generate`` does.

    Args:
        prompt: text, or token ids.
        options: further options of ``mlx_lm.generate``.

    Raises:
        SettingError: ids are no row of ids, or one lies outside the vocabulary of a model of this package.
    """
    _check(model, [prompt], options)
    _say_unbounded(model, options)
    text: str = _whole(model, tokenizer, prompt, verbose, **options)
    return text


def stream_generate(
    model: nn.Module, tokenizer: Any, prompt: str | Ids, max_tokens: int = 256, **options: Any
) -> Generator[GenerationResponse, None, None]:
    """Generate an answer piece by piece, as ``mlx_lm.stream_generate`` does.

    Args:
        prompt: text, or token ids.
        options: further options of ``mlx_lm.stream_generate``.

    Raises:
        SettingError: ids are no row of ids, or one lies outside the vocabulary of a model of this package.
    """
    _check(model, [prompt], options)
    _say_unbounded(model, options)
    return _stream(model, tokenizer, prompt, max_tokens, **options)


def batch_generate(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str | Ids], *arguments: Any, **options: Any
) -> BatchResponse:
    """Generate answers to several prompts at once, as ``mlx_lm.batch_generate`` does.

    Args:
        prompts: the text or the token ids of each; text is encoded as `generate` encodes it.
        arguments, options: further ones of ``mlx_lm.batch_generate``.

    Raises:
        SettingError: mlx-lm has no batches for the caches of this model.
        SettingError: ids are no row of ids, or one lies outside the vocabulary of a model of this package.
    """
    if isinstance(prompts, str):
        raise SettingError(
            "one text is no list of prompts", expected="a list of texts or of token ids", found=prompts[:60]
        )
    rows = [_encoded(tokenizer, p) if isinstance(p, str) else p for p in prompts]
    _check(model, rows, options)
    try:
        return _batch(model, tokenizer, rows, *arguments, **options)
    except ValueError as error:
        if "support batching" not in str(error):
            raise
        raise SettingError(
            "mlx-lm cannot put this model's caches together",
            found=str(error),
            hint="generate the answers one by one",
        ) from error


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without a second beginning-of-text where it has one, as mlx-lm encodes prompts."""
    has_start = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_start)
    return ids


def _say_unbounded(model: nn.Module, options: Mapping[str, Any]) -> None:
    reason = unbounded(model, options.get("max_kv_size"))
    if reason is not None:
        _LOG.warning("%s", reason)


def _check(model: nn.Module, prompts: Iterable[str | Ids], options: dict[str, Any]) -> None:
    if options.get("input_embeddings") is not None:
        return  # They stand for the ids.
    models = [each for each in (model, options.get("draft_model")) if isinstance(each, LanguageModel)]
    known = min((each.plan.sizes.vocab_size for each in models), default=None)
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        shape = prompt.shape if isinstance(prompt, mx.array) else np.shape(prompt)
        if len(shape) != 1 or not shape[0]:
            raise SettingError(
                "a prompt is a text or one row of token ids",
                where=f"prompt {i}",
                expected="a list of at least one id",
                found=f"ids of shape {list(shape)}",
            )
        if known is None:
            continue
        ends = [prompt.min(), prompt.max()] if isinstance(prompt, mx.array) else [min(prompt), max(prompt)]
        beyond = [end for end in map(int, ends) if not 0 <= end < known]
        if beyond:
            raise SettingError(
                "the model has no such token",
                where=f"prompt {i}",
                expected=f"ids from 0 to {known - 1}",
                found=str(beyond[0]),
                hint="encode the text with the tokenizer of this very checkpoint",
            )
