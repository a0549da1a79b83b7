"""A prediction layer guesses what the originals guess, and what it drafts is the text of plain decoding."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import load_model, save_model, stream_generate
from mlx_experts.engine.loading.api import load_with_report
from mlx_experts.engine.loading.prediction_drafts import PredictionDrafter
from mlx_experts.engine.loading.speculative import Account, speculate
from mlx_experts.engine.models.factory import ModelArgs, build
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import ConfigError, SettingError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.prediction import add_prediction_layer
from mlx_experts.registry.resolve.tiny_config import tiny_config

DATA = Path(__file__).parent.parent.parent / "data" / "prediction"
FAMILIES = sorted(path.name for path in DATA.iterdir())


@functools.cache
def kept(name: str) -> Any:
    return load_model(DATA / name, mtp=True)[0]


def test_there_are_cases() -> None:
    assert {"deepseek_v3", "glm4_moe", "mellum", "mimo_v2_flash", "qwen3_5_moe", "qwen3_next"} <= set(
        FAMILIES
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_guesses_are_those_of_the_original_layers(name: str) -> None:
    model = kept(name)
    case = np.load(DATA / name / "reference.npz")
    ids = mx.array(case["input_ids"])
    hidden, _ = model.hidden_and_logits(ids, None)
    _, guesses = model.predict(ids[:, 1:], hidden[:, :-1], None)
    want = case["guesses"]
    assert np.abs(np.array(guesses) - want).max() < 1e-4 * np.abs(want).max()
    cache = model.make_prediction_cache()
    steps = [model.predict(ids[:, i + 1 : i + 2], hidden[:, i : i + 1], cache)[1] for i in range(8)]
    assert np.abs(np.array(mx.concatenate(steps, axis=1)) - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layer_is_left_out_and_counted_unless_it_is_asked_for(name: str) -> None:
    plain, _, report = load_with_report(DATA / name)
    model = kept(name)
    assert sum(report.ignored.values()) > 10
    assert not plain.predicts
    assert model.predicts
    assert len(model.layers) == len(plain.layers) == len(make_prompt_cache(model))
    ids = mx.array([[3, 9, 27]])
    assert mx.array_equal(model(ids), plain(ids)).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_keeps_it_is_written_and_read_again(name: str, tmp_path: Path) -> None:
    model, config = load_model(DATA / name, mtp=True)
    save_model(tmp_path, model, config)
    again, _ = load_model(tmp_path, mtp=True)
    assert dict(tree_flatten(again.parameters())).keys() == dict(tree_flatten(model.parameters())).keys()
    for (path, a), (_, b) in zip(
        tree_flatten(again.parameters()), tree_flatten(model.parameters()), strict=True
    ):
        assert mx.array_equal(a, b).item(), path
    assert len(load_model(tmp_path)[0].layers) == len(model.layers)


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 2) for name in FAMILIES), ("glm4_moe", 1), ("qwen3_next", 1), ("qwen3_next", 3)],
)
def test_drafted_tokens_are_those_of_plain_decoding(name: str, count: int) -> None:
    model, prompt = kept(name), mx.array([3, 9, 27, 5, 81, 60])
    want = [token for token, _ in generate_step(prompt, model, max_tokens=30)]
    account = Account()
    steps = speculate(
        prompt,
        model,
        PredictionDrafter(model),
        num_draft_tokens=count,
        max_tokens=30,
        prefill_step_size=2,
        hidden=True,
        adaptive=False,
        account=account,
    )
    assert [token for token, _, _ in steps] == want
    assert account.drafted >= 10


def test_further_layers_are_left_out_and_counted(tmp_path: Path) -> None:
    """Released checkpoints of mimo_v2_flash have three; the second reads the first one's hidden state."""
    tensors: Any = mx.load(str(DATA / "mimo_v2_flash" / "model.safetensors"))
    more = {name.replace("mtp.layers.0.", "mtp.layers.1."): value + 1 for name, value in tensors.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {**more, **tensors}, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((DATA / "mimo_v2_flash" / "config.json").read_text())
    model, _, report = load_with_report(tmp_path, mtp=True)
    assert sum(report.ignored.values()) == len(more.keys() - tensors.keys()) > 10
    for (name, a), (_, b) in zip(
        tree_flatten(model.parameters()), tree_flatten(kept("mimo_v2_flash").parameters()), strict=True
    ):
        assert mx.array_equal(a, b).item(), name


def _with_prediction(name: str) -> Any:
    """A tiny random model of a family with its prediction layer."""
    family = catalog().load(name)
    counts = family.mtp.layers
    config = {**tiny_config(family), **{key: 1 for key in counts.keys}}
    mx.random.seed(1)
    plan = add_prediction_layer(resolve(family, config))
    model = build(ModelArgs(plan, config, None, ""))
    values = [
        (path, value + 0.3 * mx.random.normal(value.shape))
        for path, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(values))
    model.eval()
    return model


INHERITING = ("axk1", "bailing_hybrid", "bailing_moe", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "lara_mini")


@pytest.mark.parametrize("name", INHERITING)
def test_families_without_a_case_draft_the_text_of_plain_decoding(name: str) -> None:
    model, prompt = _with_prediction(name), mx.array([3, 9, 27, 5])
    want = [token for token, _ in generate_step(prompt, model, max_tokens=10)]
    account = Account()
    steps = speculate(
        prompt, model, PredictionDrafter(model), max_tokens=10, hidden=True, adaptive=False, account=account
    )
    assert [token for token, _, _ in steps] == want
    assert account.drafted >= 4


def test_a_guess_that_is_right_is_accepted() -> None:
    """The layer is made to guess what the model says, whose head and hidden state it is given."""
    model, prompt = kept("glm4_moe"), mx.array([3, 9, 27, 5])

    class Oracle(PredictionDrafter):
        def draft(self, count: int) -> mx.array:
            return mx.array(truth[self.made : self.made + count], mx.uint32)

        def confirm(self, tokens: Any, drafted: int, hidden: Any) -> None:
            super().confirm(tokens, drafted, hidden)
            self.made += len(tokens)

        made = 0

    truth = [token for token, _ in generate_step(prompt, model, max_tokens=24)]
    account = Account()
    steps = speculate(
        prompt, model, Oracle(model), max_tokens=24, hidden=True, adaptive=False, account=account
    )
    assert [token for token, _, _ in steps] == truth
    assert account.rate == 1.0


def test_families_and_checkpoints_without_such_layers_say_so(tmp_path: Path) -> None:
    cases = DATA.parent.parent / "cases"
    with pytest.raises(ConfigError, match="describes no prediction layers"):
        load_model(cases / "mixtral" / "base" / "hub", mtp=True)
    with pytest.raises(ConfigError, match="has no prediction layers"):
        load_model(DATA / "glm4_moe", mtp=True, model_config={"num_nextn_predict_layers": 0})
    plain, _ = load_model(DATA / "glm4_moe")
    with pytest.raises(SettingError, match="no prediction layer to draft with"):
        PredictionDrafter(plain)
    with pytest.raises(SettingError, match="either a draft model or"):
        stream_generate(plain, None, [1, 2], draft_model=plain, mtp=True)
    with pytest.raises(SettingError, match="no prompt cache holds"):
        stream_generate(kept("glm4_moe"), None, [1, 2], mtp=True, prompt_cache=[])
