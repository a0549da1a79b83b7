"""Sparse latent attention: what an indexer picks, who shares it, and what is attended to."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mixers.dsa import DsaOptions, shares_selection
from mlx_experts.engine.models.decoder import make_mixer
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config

HEADS, TOPK = 16, 4


def mixers(**config: Any) -> list[Any]:
    """One mixer a layer, with everything random."""
    family = catalog().load("glm_moe_dsa")
    plan = resolve(family, {**tiny_config(family), "index_n_heads": HEADS, "index_topk": TOPK, **config})
    mx.random.seed(2)
    made: list[Any] = [make_mixer(layer, plan) for layer in plan.layers]
    for mixer in made:
        drawn = [(k, v + 0.2 * mx.random.normal(v.shape)) for k, v in tree_flatten(mixer.parameters())]
        mixer.update(tree_unflatten(drawn))
    return made


def tokens(rows: int = 2, length: int = 10) -> mx.array:
    return mx.random.normal((rows, length, 64), key=mx.random.key(1))


def state_of(x: mx.array) -> ForwardState:
    return ForwardState(mx.zeros(x.shape[:2], dtype=mx.int32))


def stepwise(mixer: Any, x: mx.array, cache: Any) -> mx.array:
    parts = [x[:, :3], x[:, 3:6], *(x[:, i : i + 1] for i in range(6, x.shape[1]))]
    return mx.concatenate([mixer(part, state_of(part), cache) for part in parts], axis=1)


def close(a: mx.array, b: mx.array) -> bool:
    return bool((mx.abs(a - b).max() < 1e-5 * mx.abs(b).max()).item())


def options(**values: Any) -> DsaOptions:
    sizes = dict.fromkeys(("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim"), 8)
    index = {"index_heads": 2, "index_dim": 8, "index_topk": 4, "index_style": "half"}
    return DsaOptions.model_validate({**sizes, **index, **values})


def naive_scores(mixer: Any, x: mx.array) -> mx.array:
    """Index scores [B, L, L] from the definition."""
    index = mixer.indexer
    B, L, _ = x.shape
    q = index._rope(index.wq_b(mixer.query_latent(x)[0]).reshape(B, L, HEADS, -1).swapaxes(1, 2))
    k = index._rope(index.k_norm(index.wk(x))[:, None])
    weights = index.weights_proj(x) / (HEADS * q.shape[-1]) ** 0.5
    return mx.einsum("bhlt,blh->blt", mx.maximum(q @ k.swapaxes(-1, -2), 0), weights)


def test_queries_attend_to_the_tokens_of_the_best_scores() -> None:
    mixer, x = mixers()[0], tokens()
    L = x.shape[1]
    causal = mx.tri(L) > 0
    scores = mx.where(causal, naive_scores(mixer, x), -mx.inf)
    threshold = mx.sort(scores, axis=-1)[..., -TOPK][..., None]
    allowed = (scores >= threshold) & causal
    state, offset = state_of(x), 0
    queries = mixer.queries(mixer.query_latent(x)[1], state, offset)[:2]
    dense = mixer.attend_to_latents(*queries, *mixer.latents(x, state, offset), allowed[:, None])
    assert close(mixer(x, state_of(x)), mixer.output(dense, x))


def test_pieces_and_single_tokens_give_the_whole() -> None:
    mixer, x = mixers()[0], tokens()
    assert close(stepwise(mixer, x, mixer.make_cache()), mixer(x, state_of(x)))


def test_attention_is_dense_while_there_are_few_tokens() -> None:
    x = tokens(length=TOPK)
    few, many = mixers()[0], mixers(index_topk=100)[0]
    assert close(few(x, state_of(x)), many(x, state_of(x)))
    longer = tokens(length=TOPK + 3)
    assert not close(few(longer, state_of(longer)), many(longer, state_of(longer)))


def test_a_row_padded_on_the_left_gives_its_own_output() -> None:
    mixer, x = mixers()[0], tokens()
    padded = stepwise(mixer, x, CacheList(BatchKVCache([2, 0]), BatchKVCache([2, 0])))
    assert close(padded[:1, 2:], mixer(x[:1, 2:], state_of(x[:1, 2:])))
    assert close(padded[1:], mixer(x[1:], state_of(x[1:])))


def test_a_layer_without_an_indexer_attends_by_the_picks_before_it() -> None:
    full, shared = mixers(indexer_types=["full", "shared", "full", "full"])[:2]
    assert "indexer" in full
    assert "indexer" not in shared
    assert isinstance(shared.make_cache(), KVCache)
    x, state = tokens(), state_of(tokens())
    full(x, state)
    picked = state.picked_tokens
    shared(x, state)
    assert state.picked_tokens is picked
    # With the picks of its neighbour, and the neighbour's weights, it is its neighbour.
    shared.update(tree_unflatten([(k, v) for k, v in tree_flatten(full.parameters()) if "indexer" not in k]))
    assert close(shared(x, state), full(x, state_of(x)))


def test_index_keys_are_kept_from_the_first_token_on() -> None:
    mixer, x = mixers()[0], tokens(length=2)
    cache = mixer.make_cache()
    mixer(x, state_of(x), cache)
    assert cache[0].offset == cache[1].offset == 2


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        ({}, [False] * 6),
        ({"index_every": 2}, [False, False, True, False, True, False]),
        ({"index_every": 3, "index_first": 1}, [False, True, True, False, True, True]),
        ({"index_types": "FSSFFS"}, [False, True, True, False, False, True]),
        ({"index_types": ["full", "shared"] * 3, "index_every": 3}, [False, True] * 3),
    ],
    ids=["every layer", "every second", "from the first", "letters", "words win"],
)
def test_which_layers_share(values: dict[str, Any], shared: list[bool]) -> None:
    spec = options(**values)
    assert [shares_selection(spec, layer) for layer in range(6)] == shared


@pytest.mark.parametrize("types", ["FX", ["full"]], ids=["unknown letter", "too few"])
def test_types_that_do_not_cover_the_layers_are_refused(types: Any) -> None:
    with pytest.raises(ConfigError, match="whether each layer has an indexer"):
        shares_selection(options(index_types=types), 1)


def test_a_first_layer_that_shares_is_refused() -> None:
    with pytest.raises(ConfigError, match="none before it"):
        mixers(indexer_types=["shared", "full", "full", "full"])


def test_full_queries_are_refused() -> None:
    with pytest.raises(ConfigError, match="latent width of queries"):
        mixers(q_lora_rank=0)
