"""A layer that is one call writes the cache as MLX does, on any number of threads, and only its own."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts.engine.kernels.cpu import start
from mlx_experts.engine.layers.decode import cache_rows, whole_layer
from mlx_experts.engine.layers.decode.whole_layer import WholeLayer
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config


@pytest.fixture(scope="module")
def model():
    """The smallest qwen3_moe in 4 bits, whose kernels are decided."""
    family = catalog().load("qwen3_moe")
    made = build_tiny(family, tiny_config(family))
    made.set_dtype(mx.float32)
    nn.quantize(made, group_size=32, bits=4)
    made.eval()
    cache = started(made)
    for _ in range(2):
        one(made, cache, 3)
    return made


@pytest.fixture
def whole(monkeypatch):
    """How many layers were one call."""
    seen, right = [], WholeLayer.__call__

    def counted(*given):
        found = right(*given)
        if found is not None:
            seen.append(0)
        return found

    monkeypatch.setattr(WholeLayer, "__call__", counted)
    return seen


def started(model, prompt=5):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(prompt)[None] % 90, cache=cache))
    return cache


def one(model, cache, token):
    logits = model(mx.array([[token]]), cache=cache)
    mx.eval(logits)
    return logits


def several(model, cache, tokens):
    return mx.concatenate([one(model, cache, token) for token in tokens], axis=1)


def in_parts(model, run):
    """What ``run`` gives where no layer is one call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeLayer, "__call__", lambda *_: None)
        return run()


def off(made, wanted):
    return (mx.linalg.norm(made - wanted) / mx.linalg.norm(wanted)).item()


def held(cache):
    return [part for each in cache for part in each.keys_and_values()]


def test_the_cache_holds_what_mlx_writes(model, whole):
    def run():
        cache = started(model)
        return several(model, cache, range(4)), cache

    (made, cache), (wanted, other) = run(), in_parts(model, run)
    assert len(whole) == 4 * len(model.layers)
    assert mx.array_equal(made, wanted)
    assert [each.offset for each in cache] == [each.offset for each in other] == [9] * len(cache)
    assert all(map(mx.array_equal, held(cache), held(other)))


def test_all_threads_give_the_same(model, whole, monkeypatch):
    wanted = several(model, started(model), range(4))
    monkeypatch.setattr(start, "PARALLEL_FROM", 0)
    with pytest.MonkeyPatch.context() as patch:
        # Every call is made anew.
        patch.setattr(whole_layer._Held, "stands", lambda self: False)
        made = several(model, started(model), range(4))
    assert len(whole) == 8 * len(model.layers)
    assert mx.array_equal(made, wanted)


def test_a_copy_of_a_cache_goes_its_own_way(model, whole):
    def run():
        first = started(model)
        several(model, first, [1, 2])
        second = copy.deepcopy(first)
        made = [several(model, first, [3, 4]), several(model, second, [5, 6]), several(model, first, [7])]
        return mx.concatenate(made, axis=1)

    made, wanted = run(), in_parts(model, run)
    assert whole
    assert mx.array_equal(made, wanted)


def test_a_cache_that_is_set_back_leaves_its_copies_alone(model, whole):
    def run():
        first = started(model)
        several(model, first, [1, 2, 3])
        second = copy.deepcopy(first)
        for each in first:
            each.trim(2)
        again = several(model, first, [8, 9])
        return mx.concatenate([again, several(model, second, [4])], axis=1)

    made, wanted = run(), in_parts(model, run)
    assert whole
    assert mx.array_equal(made, wanted)


def test_rows_that_mlx_wrote_and_a_copy_shares_are_not_written_over(model, whole):
    def run():
        first = started(model)
        several(model, first, [1, 2])
        mx.eval(model(mx.array([[3, 4, 5]]), cache=first))
        second = copy.deepcopy(first)
        for each in first:
            each.trim(3)
        again = several(model, first, [8, 9])
        return mx.concatenate([again, several(model, second, [6])], axis=1)

    made, wanted = run(), in_parts(model, run)
    assert whole
    assert off(made, wanted) < 1e-6


def test_a_cache_grows(model, whole):
    def run():
        cache = started(model, prompt=254)
        return several(model, cache, range(5)), cache

    (made, cache), (wanted, _) = run(), in_parts(model, run)
    assert len(whole) == 5 * len(model.layers)
    assert cache[0].keys.shape[2] > 256
    assert mx.array_equal(made, wanted)
    # MLX goes on with it.
    assert model(mx.array([[3, 4]]), cache=cache).shape[1] == 2


def test_an_empty_cache_and_several_sequences_are_left_to_others(model, whole):
    one(model, make_prompt_cache(model), 3)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(8).reshape(2, 4), cache=cache))
    mx.eval(model(mx.array([[3], [4]]), cache=cache))
    assert not whole


@pytest.mark.parametrize(("groups", "width"), [(1, 32), (2, 16)])
def test_a_cache_of_another_shape_is_refused_and_not_written(model, whole, groups, width):
    """As the prompt cache of another model is."""
    cache = started(model)
    for each in cache:
        each.keys, each.values = (mx.ones((1, groups, 256, width)) for _ in range(2))
    with pytest.raises(ValueError, match="shape"):
        one(model, cache, 3)
    assert not whole
    assert all(mx.all(part == 1).item() for part in (cache[0].keys, cache[0].values))


def test_a_norm_whose_weight_has_gaps_is_left_to_others(model, whole):
    def run():
        cache = started(model)
        return several(model, cache, range(3))

    wanted, norm = run(), model.layers[1].input_layernorm
    whole.clear()
    weight, wide = norm.weight, mx.stack([norm.weight, norm.weight], axis=1)
    mx.eval(wide)
    norm.weight = wide[:, 0]
    assert off(run(), wanted) < 1e-6
    assert len(whole) == 3 * (len(model.layers) - 1)
    norm.weight = weight


@pytest.mark.parametrize("fault", ["position", "values"])
def test_a_planted_fault_is_seen(model, whole, fault, monkeypatch):
    wanted, right = several(model, started(model), range(3)), cache_rows.next_place

    def wrong(*given):
        place = right(*given)
        if fault == "position":
            return place._replace(position=place.position - 1)
        return place._replace(values=place.values - 4)

    monkeypatch.setattr(whole_layer, "next_place", wrong)
    assert off(several(model, started(model), range(3)), wanted) > 1e-4
