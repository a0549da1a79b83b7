"""Token ids that a model does not have are refused where generating begins."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import mlx.core as mx
import pytest

import mlx_experts
from mlx_experts.registry.errors import SettingError

DEMO = str(files("mlx_experts").joinpath("demo"))


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return mlx_experts.load(DEMO)


@pytest.mark.parametrize("wrap", [list, tuple, mx.array])
@pytest.mark.parametrize("bad", [-1, 0, 7, 10**6])
@pytest.mark.parametrize("way", ["generate", "stream_generate", "batch_generate"])
def test_ids_outside_the_vocabulary_are_refused(way: str, bad: int, wrap: Any, demo: Any) -> None:
    model, tokenizer = demo
    known = model.plan.sizes.vocab_size
    bad = bad if bad < 0 else known + bad
    prompt = wrap([1, bad, 2])
    with pytest.raises(SettingError, match="no such token") as caught:
        getattr(mlx_experts, way)(model, tokenizer, [wrap([1]), prompt] if "batch" in way else prompt)
    assert caught.value.found == str(bad)
    assert caught.value.expected == f"ids from 0 to {known - 1}"
    assert caught.value.where == ("prompt 1" if "batch" in way else "prompt 0")


def test_a_draft_model_is_asked_too(demo: Any) -> None:
    model, tokenizer = demo
    with pytest.raises(SettingError, match="no such token"):
        mlx_experts.generate(model, tokenizer, [10**6], draft_model=model)


def test_ids_of_the_vocabulary_and_text_give_the_same_answers(demo: Any) -> None:
    model, tokenizer = demo
    last = model.plan.sizes.vocab_size - 1
    ids = tokenizer.encode("A mixture")
    text = mlx_experts.generate(model, tokenizer, "A mixture", max_tokens=4)
    assert mlx_experts.generate(model, tokenizer, ids, max_tokens=4) == text
    assert mlx_experts.batch_generate(model, tokenizer, [ids], max_tokens=4).texts == [text]
    assert "".join(r.text for r in mlx_experts.stream_generate(model, tokenizer, ids, max_tokens=4)) == text
    assert isinstance(mlx_experts.generate(model, tokenizer, [0, last], max_tokens=1), str)


def test_a_model_of_another_package_is_left_to_it(demo: Any) -> None:
    """What its ids may be is not known here."""
    from mlx_lm.utils import load_model

    theirs, _ = load_model(files("mlx_experts").joinpath("demo"))
    ids = demo[1].encode("A mixture")
    assert mlx_experts.generate(theirs, demo[1], ids, max_tokens=2)


@pytest.mark.parametrize("prompt", [[], [[5, 6, 7]], mx.array([[5, 6]]), mx.array(5)], ids=str)
def test_a_prompt_that_is_no_row_of_ids_is_refused(prompt: Any, demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    with pytest.raises(SettingError, match="one row of token ids"):
        mlx_experts.generate(model, tokenizer, prompt)
