"""mlx-lm's ways to generate, behind a look at the token ids: past an embedding's rows MLX reads anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchResponse, GenerationResponse
from mlx_lm.generate import batch_generate as _batch
from mlx_lm.generate import generate as _whole
from mlx_lm.generate import stream_generate as _stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_experts.engine.loading.prediction_drafts import PredictionDrafter
from mlx_experts.engine.loading.prompt_caches import unbounded
from mlx_experts.engine.loading.speculative import Account, Token, speculate, speculative_step
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.model import last_position
from mlx_experts.registry.errors import SettingError

_LOG = logging.getLogger("mlx_experts")
Ids = Sequence[int] | mx.array


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | Ids, verbose: bool = False, **options: Any
) -> str:
    """Generate a whole answer, as ``mlx_lm.generate`` does.

    Args:
        prompt: text, or token ids.
        options: further options of ``mlx_lm.generate`` and of :func:`stream_generate`.

    Raises:
        SettingError: ids are no row of ids, or one lies outside the vocabulary of a model of this package.
    """
    if not verbose:
        return "".join(part.text for part in stream_generate(model, tokenizer, prompt, **options))
    _check(model, [prompt], options)
    _say_unbounded(model, options)
    text: str = _whole(last_position(model), tokenizer, prompt, verbose, **options)
    return text


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Ids,
    max_tokens: int = 256,
    *,
    draft_model: nn.Module | None = None,
    mtp: bool = False,
    adaptive_draft: bool = True,
    drafting: Account | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate an answer piece by piece, as ``mlx_lm.stream_generate`` does.

    Args:
        prompt: text, or token ids.
        draft_model: a smaller model of the same vocabulary, whose guesses the model checks.
        mtp: draft with the model's own prediction layer; see ``load(..., mtp=True)``.
        adaptive_draft: end drafting where it takes longer than it saves.
        drafting: filled with what drafting did.
        options: further options of ``mlx_lm.stream_generate``.

    Raises:
        SettingError: ids are no row of ids, or one lies outside the vocabulary of a model of this package.
        SettingError: a cache cannot go back, which a draft needs.
    """
    _check(model, [prompt], {**options, "draft_model": draft_model})
    _say_unbounded(model, options)
    if draft_model is None and not mtp:
        options.pop("num_draft_tokens", None)
        return _stream(last_position(model), tokenizer, prompt, max_tokens, **options)
    ids = prompt_ids(tokenizer, prompt)
    for name in ("max_kv_size", "prompt_progress_callback"):
        # As in mlx-lm, a draft and the model read the prompt in their own ways.
        options.pop(name, None)
    if draft_model is None:
        return respond(
            _predicted(ids, model, max_tokens, adaptive_draft, drafting, options),
            tokenizer,
            ids.size,
            max_tokens,
        )
    if mtp:
        raise SettingError("either a draft model or the prediction layer drafts", found="draft_model and mtp")
    tokens = speculative_step(
        ids,
        model,
        draft_model,
        max_tokens=max_tokens,
        adaptive=adaptive_draft,
        account=drafting,
        **options,
    )
    return respond(tokens, tokenizer, ids.size, max_tokens)


def _predicted(
    ids: mx.array,
    model: nn.Module,
    max_tokens: int,
    adaptive: bool,
    account: Account | None,
    options: dict[str, Any],
) -> Generator[Token, None, None]:
    """Tokens that the model's own prediction layer drafts."""
    if not isinstance(model, LanguageModel):
        raise SettingError("only models of this package have a prediction layer", found=type(model).__name__)
    if options.pop("prompt_cache", None) is not None:
        raise SettingError(
            "a prediction layer reads the hidden states of the whole prompt, which no prompt cache holds",
            found="prompt_cache and mtp",
        )
    return speculate(
        ids,
        model,
        PredictionDrafter(model),
        max_tokens=max_tokens,
        hidden=True,
        adaptive=adaptive,
        account=account,
        **{"num_draft_tokens": 1, **options},
    )


def prompt_ids(tokenizer: Any, prompt: str | Ids) -> mx.array:
    """A prompt as token ids [L]."""
    if isinstance(prompt, mx.array):
        return prompt
    return mx.array(_encoded(tokenizer, prompt) if isinstance(prompt, str) else list(prompt))


def respond(
    tokens: Generator[Token, None, None], tokenizer: Any, prompt_tokens: int, max_tokens: int
) -> Generator[GenerationResponse, None, None]:
    """Tokens as the answers that ``mlx_lm.stream_generate`` gives, to the end of the text."""
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    detokenizer, began, prompt_tps, made = tokenizer.detokenizer, time.perf_counter(), 0.0, 0

    def answer(last: Token, finish_reason: str | None) -> GenerationResponse:
        token, logprobs, drafted = last
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=drafted,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=made,
            generation_tps=made / (time.perf_counter() - began),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
        )

    with closing(tokens):
        for last in tokens:
            if not made:
                prompt_tps, began = prompt_tokens / (time.perf_counter() - began), time.perf_counter()
            made += 1
            if last[0] in tokenizer.eos_token_ids:
                break
            detokenizer.add_token(last[0])
            if made == max_tokens:
                break
            yield answer(last, None)
        detokenizer.finalize()
        yield answer(last, "stop" if last[0] in tokenizer.eos_token_ids else "length")


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
        return _batch(last_position(model), tokenizer, rows, *arguments, **options)
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
