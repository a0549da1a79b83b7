"""Hashed n-gram embeddings against a loop over single tokens."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.plugins.builtin.ngram_embedding import NgramEmbedding
from mlx_experts.registry.errors import ConfigError, SpecError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

END, LONGEST, TABLES, RATIO, VOCABULARY = 5, 4, 2, 3, 96
IDS = [7, 90, END, 3, 41, 41, 8, END, END, 60, 2, 9]


def embedding(**config: Any) -> NgramEmbedding:
    family = catalog().load("longcat_flash_ngram")
    stated = {
        "emb_neighbor_num": LONGEST,
        "emb_split_num": TABLES,
        "ngram_vocab_size_ratio": RATIO,
        "eos_token_id": END,
        "hidden_size": 96,
    }
    mx.random.seed(6)
    return NgramEmbedding(resolve(family, {**tiny_config(family), **stated, **config}))


def run(module: NgramEmbedding, ids: list[list[int]], cache: Any = None) -> mx.array:
    inputs = mx.array(ids)
    return module(inputs, ForwardState(inputs), cache)


def token_by_token(module: NgramEmbedding, ids: list[int]) -> mx.array:
    """The definition: each token with the tokens since the last boundary, a missing one being 0."""
    rows = []
    for at, token in enumerate(ids):
        history: list[int] = []
        for previous in reversed(ids[:at]):
            if previous == END:
                break
            history.append(previous)
        history += [0] * LONGEST
        h = module.word_embeddings(mx.array(token))
        for i in range(TABLES * (LONGEST - 1)):
            size = RATIO * VOCABULARY + 2 * i + 1
            reach = i // TABLES + 1
            row = (token + sum(history[d] * VOCABULARY ** (d + 1) for d in range(reach))) % size
            h = h + module.post_projs[i](module.embedders[i](mx.array(row)))
        rows.append(h / (1 + TABLES * (LONGEST - 1)))
    return mx.stack(rows)


def close(a: mx.array, b: mx.array) -> bool:
    return bool((mx.abs(a - b).max() < 1e-5).item())


def test_rows_are_hashes_of_the_tokens_since_the_last_boundary() -> None:
    module = embedding()
    assert close(run(module, [IDS])[0], token_by_token(module, IDS))


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (5, 6), (7, 11)], ids=str)
def test_pieces_give_the_whole(cuts: tuple[int, ...]) -> None:
    module = embedding()
    cache = module.make_cache()
    edges = [0, *cuts, len(IDS)]
    parts = [run(module, [IDS[a:b]], cache) for a, b in itertools.pairwise(edges)]
    assert close(mx.concatenate(parts, axis=1), run(module, [IDS]))


def test_padding_on_the_left_is_before_the_text() -> None:
    module = embedding()
    cache = ArraysCache(1, left_padding=[2, 0])
    rows = [[11, 12, *IDS[3:7]], IDS[:6]]
    first, then = run(module, rows, cache), run(module, [[60], [61]], cache)
    both = mx.concatenate([first, then], axis=1)
    assert close(both[0, 2:], run(module, [[*IDS[3:7], 60]])[0])
    assert close(both[1], run(module, [[*IDS[:6], 61]])[0])


def test_padding_on_the_right_is_not_remembered() -> None:
    module = embedding()
    cache = module.make_cache()
    cache.prepare(lengths=[4, 6])
    run(module, [[*IDS[3:7], 77, 78], IDS[:6]], cache)
    cache.finalize()
    then = run(module, [[60], [61]], cache)
    assert close(then[0], run(module, [[*IDS[3:7], 60]])[0, -1:])
    assert close(then[1], run(module, [[*IDS[:6], 61]])[0, -1:])


def test_several_boundary_tokens_may_be_given() -> None:
    one, two = embedding(), embedding(eos_token_id=[END, 41])
    two.update(one.parameters())
    assert close(run(one, [IDS])[0, :5], run(two, [IDS])[0, :5])
    assert not close(run(one, [IDS])[0, 5], run(two, [IDS])[0, 5])


def test_hashes_past_32_bits_are_exact() -> None:
    module = embedding(vocab_size=1 << 16, ngram_vocab_size_ratio=0.01)
    module._rows = [(1 << 31) - 1] * len(module._rows)
    asked: list[mx.array] = []

    class Table(nn.Module):
        def __call__(self, rows: mx.array) -> mx.array:
            asked.append(rows)
            return mx.zeros((*rows.shape, 16))

    module.embedders = [Table() for _ in module._rows]
    run(module, [[65000, 64000, 63000]])
    assert asked[0][0, 1].item() == (64000 + 65000 * (1 << 16)) % ((1 << 31) - 1)


def test_a_width_that_the_tables_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="divided among the n-gram tables"):
        embedding(hidden_size=64)


def test_tables_without_ngrams_are_refused_with_what_to_correct() -> None:
    with pytest.raises(ConfigError, match="so there are none") as caught:
        embedding(emb_neighbor_num=1)
    assert caught.value.expected == "`longest` of 2 or more"
    assert caught.value.found == "1"
    assert "`ratio` of 0" in caught.value.hint
    assert len(embedding(emb_neighbor_num=1, ngram_vocab_size_ratio=0).embedders) == 0


def test_a_text_must_have_an_end() -> None:
    family = catalog().load("longcat_flash_ngram")
    options = {**family.embedding.options, "boundary": []}
    changed = family.model_copy(
        update={"embedding": family.embedding.model_copy(update={"options": options})}
    )
    with pytest.raises(SpecError) as caught:
        NgramEmbedding(resolve(changed, tiny_config(family)))
    assert caught.value.where == "options.boundary"
