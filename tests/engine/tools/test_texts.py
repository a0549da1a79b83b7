"""Texts are read as they stand, cut into windows, and scored as their definition says."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts import load
from mlx_experts.engine.tools import texts
from mlx_experts.registry.errors import SettingError

DEMO = Path(str(files("mlx_experts").joinpath("demo")))


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_windows_hold_every_token_once_but_a_lone_last_one() -> None:
    assert texts.windows(["abcdefg"], Letters(), 3) == [[97, 98, 99], [100, 101, 102]]
    assert texts.windows(["abcde", "fg"], Letters(), 3, most=5) == [[97, 98, 99], [100, 101]]
    with pytest.raises(SettingError, match="at least two"):
        texts.windows(["abc"], Letters(), 1)


def test_lines_of_json_have_the_forms_of_mlx_lms_data(tmp_path: Path) -> None:
    lines = [{"text": "a"}, {"prompt": "b", "completion": "c"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert texts.read_texts(data=path) == ["a", "bc"]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"texts": "a"}', '{"messages": []}'])
def test_a_line_of_another_form_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(SettingError) as caught:
        texts.read_texts(data=path, tokenizer=Letters())
    assert f"{path}, line 2" in caught.value.where


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text(" \n")
    for name in ("binary", "empty", "none"):
        with pytest.raises(SettingError) as caught:
            texts.read_texts(text=tmp_path / name)
        assert str(tmp_path / name) in caught.value.where
    with pytest.raises(SettingError, match="give one file"):
        texts.read_texts()


def test_perplexity_is_the_exponent_of_the_mean_negative_log_likelihood() -> None:
    model, _ = load(DEMO)
    given = [[5, 9, 2, 7], [3, 30, 8]]
    losses = []
    for window in given:
        logits = np.array(model(mx.array([window])))[0].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-logs[i, token] for i, token in enumerate(window[1:])]
    assert texts.perplexity(model, given) == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
