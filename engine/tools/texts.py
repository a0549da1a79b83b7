"""Texts to windows of token ids, and a model's perplexity on them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.registry.errors import SettingError

Window = list[int]


def read_texts(text: Path | None = None, data: Path | None = None, tokenizer: Any = None) -> list[str]:
    """The texts of a plain file, or of a file with one JSON object a line.

    Args:
        text: a UTF-8 text, taken as one.
        data: lines of JSON with `text`, with `prompt` and `completion`, or with `messages`, which go through
            the tokenizer's chat template: the forms that mlx-lm's training data has.
        tokenizer: for `messages`.

    Raises:
        SettingError: not exactly one file is given, it cannot be read, or a line has none of these forms.
    """
    given = [path for path in (text, data) if path is not None]
    if len(given) != 1:
        raise SettingError("give one file: a text, or lines of JSON", expected="--text FILE or --data FILE")
    (path,) = given
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("the text cannot be read", where=str(path), found=str(error)[:200]) from error
    texts = (
        [content]
        if text is not None
        else [
            _text_of(line, f"{path}, line {number}", tokenizer)
            for number, line in enumerate(content.splitlines(), 1)
            if line.strip()
        ]
    )
    if not any(each.strip() for each in texts):
        raise SettingError("the text is empty", where=str(path))
    return texts


def _text_of(line: str, where: str, tokenizer: Any) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SettingError("a line is not JSON", where=where, found=str(error)) from error
    if isinstance(entry, dict):
        if isinstance(entry.get("text"), str):
            return str(entry["text"])
        if isinstance(entry.get("prompt"), str) and isinstance(entry.get("completion"), str):
            return f"{entry['prompt']}{entry['completion']}"
        if isinstance(entry.get("messages"), list) and tokenizer is not None and tokenizer.chat_template:
            return str(tokenizer.apply_chat_template(entry["messages"], tokenize=False))
    raise SettingError(
        "a line has no text",
        where=where,
        expected="`text`, or `prompt` and `completion`, or `messages` where there is a chat template",
        found=line[:80],
    )


def windows(texts: Iterable[str], tokenizer: Any, length: int, most: int | None = None) -> list[Window]:
    """The texts' tokens in windows of at most ``length``; a window of one token is left out.

    Args:
        most: stop after so many tokens.
    """
    if length < 2:
        raise SettingError("a window has at least two tokens", found=str(length))
    found: list[Window] = []
    left = math.inf if most is None else most
    for text in texts:
        ids = list(tokenizer.encode(text))
        for start in range(0, len(ids), length):
            window = ids[start : start + int(min(length, left))]
            if len(window) > 1:
                found.append(window)
                left -= len(window)
            if left < 2:
                return found
    return found


def logits_of(model: LanguageModel, window: Sequence[int]) -> mx.array:
    """Logits ``[L, vocabulary]`` of one window, without a cache."""
    logits: mx.array = model(mx.array([list(window)]))
    return logits[0]


def evaluate(model: LanguageModel, window: Sequence[int]) -> None:
    """Run a window through the model for what it leaves behind."""
    mx.eval(logits_of(model, window))


def perplexity(model: LanguageModel, given: Iterable[Window]) -> float:
    """``exp`` of the mean negative log-likelihood of each window's tokens but its first, in float32."""
    total, count = 0.0, 0
    for loss, tokens in losses(model, given):
        total, count = total + loss, count + tokens
    if not count:
        raise SettingError("there is no token to predict", expected="a text of at least two tokens")
    return math.exp(total / count)


def losses(model: LanguageModel, given: Iterable[Window]) -> Iterator[tuple[float, int]]:
    """The sum of the negative log-likelihoods of each window, and of how many tokens it is."""
    for window in given:
        logits = logits_of(model, window)[:-1].astype(mx.float32)
        loss = nn.losses.cross_entropy(logits, mx.array(window[1:]), reduction="sum")
        yield float(loss.item()), len(window) - 1
