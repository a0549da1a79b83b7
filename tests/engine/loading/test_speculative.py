"""Drafts change how long a text takes, and never the text."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from dense_checkpoint import DEMO, write_dense
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from mlx_experts import batch_generate, generate, load, stream_generate, trace
from mlx_experts.engine.loading.doors import Doors, open_doors
from mlx_experts.engine.loading.speculative import Account, DraftModel, speculate, speculative_step
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.resolve.tiny_config import tiny_config

PROMPT = "A mixture-of-experts model"


@functools.cache
def demo() -> tuple[Any, Any]:
    return load(DEMO)


@functools.cache
def tiny(name: str, seed: int = 0) -> Any:
    family = catalog().load(name)
    return build_tiny(family, tiny_config(family), seed)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A draft model whose guesses are all wrong."""
    return mlx_lm.load(str(write_dense(tmp_path_factory.mktemp("drafts") / "dense")))[0]


def plain(model: Any, prompt: mx.array, count: int, **options: Any) -> list[int]:
    return [token for token, _ in generate_step(prompt, model, max_tokens=count, **options)]


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("penalty", [None, 1.3])
def test_greedy_tokens_are_those_of_plain_decoding(
    drafts: int, own: bool, penalty: float | None, dense: Any
) -> None:
    model, tokenizer = demo()
    prompt = mx.array(tokenizer.encode(PROMPT))
    processors = make_logits_processors(repetition_penalty=penalty) or None
    want = plain(model, prompt, 24, logits_processors=processors)
    account = Account()
    found = list(
        speculative_step(
            prompt,
            model,
            model if own else dense,
            num_draft_tokens=drafts,
            max_tokens=24,
            logits_processors=processors,
            adaptive=False,
            account=account,
        )
    )
    assert [token for token, _, _ in found] == want
    assert sum(drafted for _, _, drafted in found) == account.accepted
    if own and penalty is None:
        assert account.rate == 1.0
    if not own:
        assert account.rate < 0.2


def test_a_model_with_fewer_caches_than_layers_keeps_its_own() -> None:
    """Layers that reuse keys and values have none; mlx-lm cuts the list by the number of layers."""
    model, draft = tiny("gemma4"), tiny("qwen3_moe")
    assert len(make_prompt_cache(model)) <= len(model.layers)
    prompt = mx.array([3, 9, 4, 1, 7])
    caches = make_prompt_cache(model) + make_prompt_cache(draft)
    steps = speculative_step(prompt, model, draft, max_tokens=12, prompt_cache=caches, adaptive=False)
    assert [token for token, _, _ in steps] == plain(model, prompt, 12)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("given", [1, 2, 3, 4, 6])
def test_a_cache_of_the_callers_holds_every_token_that_was_given(
    own: bool, given: int, adaptive: bool, dense: Any
) -> None:
    model, tokenizer = demo()
    draft = model if own else dense
    prompt = mx.array(tokenizer.encode(PROMPT))
    caches = make_prompt_cache(model) + make_prompt_cache(draft)
    steps = speculative_step(
        prompt, model, draft, num_draft_tokens=3, max_tokens=20, prompt_cache=caches, adaptive=adaptive
    )
    tokens = [next(steps)[0] for _ in range(given)]
    steps.close()
    assert {cache.offset for cache in caches} == {prompt.size + given}
    rest = plain(model, mx.array([11]), 4, prompt_cache=caches[: len(model.layers)])
    assert rest == plain(model, mx.concatenate([prompt, mx.array([*tokens, 11])]), 4)


class Slow(DraftModel):
    """A drafter that takes its time."""

    def draft(self, count: int) -> mx.array:
        time.sleep(0.05)
        return super().draft(count)


def test_drafting_that_loses_ends_and_the_text_goes_on() -> None:
    model, tokenizer = demo()
    prompt = mx.array(tokenizer.encode(PROMPT))
    account = Account()
    steps = speculate(prompt, model, Slow(model), num_draft_tokens=2, max_tokens=50, account=account)
    processors = make_logits_processors(repetition_penalty=1.2)
    assert [token for token, _, _ in steps] == plain(model, prompt, 50)
    assert account.stopped.startswith("drafting ended: ")
    assert account.drafted < 12
    steps = speculate(prompt, model, Slow(model), max_tokens=40, logits_processors=processors)
    assert [token for token, _, _ in steps] == plain(model, prompt, 40, logits_processors=processors)


@pytest.mark.report("T7")
def test_a_model_that_drafts_for_itself_is_checked_in_fused_rows() -> None:
    """The check is one fused call a layer; scripts/time_generation.py has the times."""
    model, tokenizer = demo()
    trace.reset()
    steps = speculate(
        mx.array(tokenizer.encode(PROMPT)),
        model,
        DraftModel(model),
        num_draft_tokens=3,
        max_tokens=24,
        adaptive=False,
    )
    assert len(list(steps)) == 24
    assert {row.path for row in trace.snapshot()} == {"fused"}
    layers = len(model.layers)
    assert trace.total("fused", rows="3-4") >= 5 * layers
    assert trace.total("fused", rows="1") >= 12 * layers


@pytest.mark.report("T8")
def test_eight_sequences_are_decoded_in_one_fused_call_a_layer() -> None:
    """scripts/time_generation.py holds their time against eight runs in turn."""
    model, tokenizer = demo()
    prompts = [tokenizer.encode(f"{PROMPT} {i}") for i in range(8)]
    want = [generate(model, tokenizer, prompt, max_tokens=12) for prompt in prompts]
    trace.reset()
    # mlx-lm's streaming detokenizer drops a space at the start.
    found = batch_generate(model, tokenizer, prompts, max_tokens=12).texts
    assert [text.lstrip() for text in found] == [text.lstrip() for text in want]
    assert {row.path for row in trace.snapshot()} == {"fused"}
    assert trace.total(rows="5-8") >= 11 * len(model.layers)
    assert trace.total(rows="1") == 0


def test_one_busy_moment_does_not_end_drafting_that_wins() -> None:
    account = Account(rounds=[(0.1, 3, 4), (5.0, 3, 4), (0.1, 3, 4), (0.1, 3, 4)] * 2, steps=[0.05])
    assert not account.loses()
    account = Account(rounds=[(0.1, 3, 4)] * 5, steps=[0.04, 9.0])
    assert not account.loses()


def test_drafting_that_wins_goes_on() -> None:
    account = Account(rounds=[(9.0, 3, 1)] + [(0.1, 3, 4)] * 4, steps=[0.05])
    assert not account.loses()
    assert account.stopped == ""


def test_drafting_is_ended_early_only_where_no_guess_could_save_it() -> None:
    """Two rounds of one token each say little of how many guesses stand."""
    account = Account(rounds=[(0.1, 3, 1)] * 2, steps=[0.05])
    assert not account.loses()
    account.rounds *= 3
    assert account.loses()
    account = Account(rounds=[(0.3, 3, 4)], steps=[0.05])
    assert not account.loses()
    account.rounds *= 2
    assert account.loses()
    assert account.stopped == "drafting ended: 75.0 ms a token with it, 50.0 ms without"


def test_a_draft_as_large_as_the_model_costs_two_rounds() -> None:
    """Its guesses are all right, and a round takes as long as more than its tokens do without."""
    model, tokenizer = demo()
    prompt = mx.array(tokenizer.encode(PROMPT))
    account = Account()
    steps = speculate(prompt, model, Slow(model), num_draft_tokens=3, max_tokens=60, account=account)
    found = list(steps)
    assert [token for token, _, _ in found] == plain(model, prompt, 60)
    assert account.drafted == 6
    assert [i for i, (_, _, drafted) in enumerate(found) if drafted] == [4, 5, 6, 8, 9, 10]


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "gpt_oss", "longcat_flash", "jamba"])
def test_states_and_full_windows_go_back_to_where_they_were(name: str) -> None:
    """Windows of 8 tokens, states of every kind, several caches a layer; all guesses are wrong."""
    model, draft, prompt = tiny(name), tiny("qwen3_moe"), mx.array([3, 9, 4, 1, 7])
    want = plain(model, prompt, 24)
    steps = speculative_step(prompt, model, draft, num_draft_tokens=3, max_tokens=24, adaptive=False)
    assert [token for token, _, _ in steps] == want
    for given, adaptive in ((2, False), (3, False), (9, False), (3, True), (5, True)):
        caches = make_prompt_cache(model) + make_prompt_cache(draft)
        steps = speculative_step(
            prompt, model, draft, max_tokens=24, prompt_cache=caches, adaptive=adaptive, num_draft_tokens=3
        )
        assert [next(steps)[0] for _ in range(given)] == want[:given]
        steps.close()
        own = caches[: len(make_prompt_cache(model))]
        assert plain(model, mx.array([11]), 4, prompt_cache=own) == plain(
            model, mx.concatenate([prompt, mx.array([*want[:given], 11])]), 4
        )


def test_a_draft_model_whose_state_cannot_go_back_is_refused_in_words() -> None:
    model = tiny("qwen3_next")
    with pytest.raises(SettingError, match="goes back in the prompt cache") as caught:
        list(speculative_step(mx.array([1, 2]), tiny("qwen3_moe"), model))
    assert caught.value.found == "ArraysCache"


def test_a_number_of_guesses_below_none_is_refused() -> None:
    with pytest.raises(SettingError, match="no such number of guesses"):
        list(
            speculate(mx.array([1, 2]), tiny("qwen3_moe"), DraftModel(tiny("qwen3_moe")), num_draft_tokens=-2)
        )


def test_public_generating_takes_a_draft_model(dense: Any) -> None:
    model, tokenizer = demo()
    want = generate(model, tokenizer, PROMPT, max_tokens=12)
    assert generate(model, tokenizer, PROMPT, max_tokens=12, draft_model=dense) == want
    account = Account()
    parts = list(
        stream_generate(
            model, tokenizer, PROMPT, 12, draft_model=model, adaptive_draft=False, drafting=account
        )
    )
    assert "".join(part.text for part in parts) == want
    assert [part.finish_reason for part in parts[-2:]] == [None, "length"]
    assert parts[-1].generation_tokens == 12
    assert any(part.from_draft for part in parts)
    assert account.rate == 1.0


def test_mlx_lms_own_generating_drafts_here_while_the_doors_are_open(tmp_path: Path, dense: Any) -> None:
    model, tokenizer = demo()
    told: list[str] = []
    want = generate(model, tokenizer, PROMPT, max_tokens=40)
    with open_doors(Doors(tell=told.append)):
        assert mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=40, draft_model=dense) == want
    assert all("drafting ended" in text for text in told)
