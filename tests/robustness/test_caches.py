"""Windows, chunks, prefixes, batches and quantised caches give what the whole sequence alone gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from representatives import mixers, one_of_each

from mlx_experts.engine.dispatch.trace import trace
from mlx_experts.engine.loading import generate as generation
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.spec.family import GqaSpec

# Their pooled groups close at steps that differ between rows.
ALONE = {"deepseek_v4"}
# Its windows are over generated tokens, which in one piece there are none of.
WIDE = {"unlimited_ocr": {"text_config": {"sliding_window": 24}}}
FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]


def bounds(model: Any) -> list[int]:
    """Windows and chunks of a model's attentions."""
    found = []
    for layer in model.args.plan.layers:
        if isinstance(layer.mixer, GqaSpec):
            found += [layer.mixer.window or 0, layer.mixer.chunk or 0]
    return [each for each in found if each]


def ids(model: Any, count: int, rows: int = 1) -> mx.array:
    mx.random.seed(11)
    return mx.random.randint(0, model.args.plan.sizes.vocab_size, (rows, count))


@pytest.mark.report("CCH-01", "CCH-03")
@pytest.mark.parametrize("name", one_of_each(mixers, FAMILIES))
def test_tokens_past_a_window_or_a_chunk_give_what_the_whole_gives(name: str, lab: Any) -> None:
    """24 tokens over windows and chunks of at most 8: one by one, and in two pieces."""
    model, _ = lab.tiny(name, WIDE.get(name))
    assert all(each <= 8 for each in bounds(model))
    tokens = ids(model, 24)
    want = np.array(model(tokens))
    for cuts in (range(1, 24), (9,)):
        cache = make_prompt_cache(model)
        pieces = [model(part, cache=cache) for part in mx.split(tokens, list(cuts), axis=1)]
        assert lab.distance(np.array(mx.concatenate(pieces, axis=1)), want) < 1e-4


@pytest.mark.report("CCH-03")
@pytest.mark.parametrize("name", ["llama4", "llama4_text"])
def test_a_chunk_boundary_hides_earlier_chunks_and_nothing_else(name: str, lab: Any) -> None:
    stated = {"attention_chunk_size": 4}
    text = catalog().load(name).text_config
    model, _ = lab.tiny(name, {"text_config": stated} if text else stated)
    assert 4 in bounds(model)
    tokens = ids(model, 12)
    cache = make_prompt_cache(model)
    steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(12)]
    assert lab.distance(np.array(mx.concatenate(steps, axis=1)), np.array(model(tokens))) < 1e-4


@pytest.mark.report("CCH-05")
@pytest.mark.parametrize("name", one_of_each(mixers, FAMILIES))
def test_a_prefix_is_reused_rightly_or_not_at_all(name: str, lab: Any) -> None:
    """A prompt cache of mixed layers either goes back to a prefix, or says that it cannot."""
    model, _ = lab.tiny(name)
    tokens, other = ids(model, 7), ids(model, 9)[:, 5:]
    cache = make_prompt_cache(model)
    model(tokens, cache=cache)
    if not can_trim_prompt_cache(cache):
        # A state that every token has changed does not go back.
        assert not all(each.is_trimmable() for each in cache)
        assert trim_prompt_cache(cache, 3) == 0
        return
    assert trim_prompt_cache(cache, 3) == 3
    got = model(other, cache=cache)
    want = model(mx.concatenate([tokens[:, :4], other], axis=1))[:, 4:]
    assert lab.distance(np.array(got), np.array(want)) < 1e-4


class BareTokens:
    """The least that mlx-lm's batching asks of a tokenizer, over bare token ids."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.report("CCH-10")
def test_a_quantised_cache_cannot_join_a_batch_and_is_refused_before_anything_runs(lab: Any) -> None:
    model, _ = lab.tiny("qwen3_moe")
    prompt = ids(model, 5)[0].tolist()
    caches = []
    for _ in range(2):
        cache = make_prompt_cache(model)
        model(mx.array([prompt[:3]]), cache=cache)
        caches.append([each.to_quantized(group_size=32, bits=8) for each in cache])
    with pytest.raises(ValueError, match=r"QuantizedKVCache.* does not yet support batching"):
        batch_generate(model, BareTokens(), [prompt, prompt], prompt_caches=caches, max_tokens=2)
    with pytest.raises(SettingError, match="put this model's caches together"):
        generation.batch_generate(model, BareTokens(), [prompt, prompt], prompt_caches=caches, max_tokens=2)


@pytest.mark.report("CCH-12", "CCH-08")
@pytest.mark.parametrize("name", one_of_each(mixers, FAMILIES))
def test_requests_decoded_together_give_each_its_own_tokens(name: str, lab: Any) -> None:
    """Two rows run fused on the CPU, which the trace says."""
    model, _ = lab.tiny(name)
    prompts = [ids(model, 7)[0].tolist(), ids(model, 4)[0].tolist()]
    if name in ALONE:
        with pytest.raises(SettingError, match="cannot put this model's caches together"):
            generation.batch_generate(model, BareTokens(), prompts, max_tokens=3)
        return
    alone = []
    for prompt in prompts:
        steps = generate_step(mx.array(prompt), model, max_tokens=3)
        alone.append(BareTokens().decode([int(token) for token, _ in steps]))
    trace.reset()
    both = batch_generate(model, BareTokens(), prompts, max_tokens=3)
    together = {(row.path, row.reason) for row in trace.snapshot() if row.rows == "2"}
    trace.reset()
    assert both.texts == alone
    # Where weights multiply the inputs, every pick is a row of its own.
    if not any(moe._spec.experts.apply_router_weight_on_input for moe in lab.blocks(model)):
        assert together == {("fused", "cpu")}
