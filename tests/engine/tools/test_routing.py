"""What is recorded of the routers is what they picked, and recording changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts import load_model
from mlx_experts.engine.kernels import naive
from mlx_experts.engine.kernels.expert_weights import read
from mlx_experts.engine.layers.module_tree import find
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.tools.routing import blocks_of, read_routing, record_routing
from mlx_experts.registry.errors import SettingError

DEMO = Path(str(files("mlx_experts").joinpath("demo")))
IDS = [[5, 9, 2, 7, 30, 8, 100, 6, 11, 3, 250, 17]]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model(DEMO)[0]


def test_counts_are_those_of_the_routers_own_answers(model: LanguageModel) -> None:
    seen: list[tuple[mx.array, mx.array, mx.array]] = []
    with record_routing(model) as routing:
        block = blocks_of(model)[1][1]
        layer = routing.layers[1]
        routed, applied = layer.routed, layer.applied

        def also(indices: mx.array, weights: mx.array) -> None:
            seen.append((indices, weights, mx.zeros(0)))
            routed(indices, weights)

        layer.routed = also  # type: ignore[method-assign]
        layer.applied = applied  # type: ignore[method-assign]
        mx.eval(model(mx.array(IDS)))
    rows, weights = np.array(seen[0][0]).reshape(-1, block.top_k), seen[0][1]
    assert len(rows) == layer.tokens == len(IDS[0])
    assert dict(enumerate(layer.picks)) == {e: int((rows == e).sum()) for e in range(block.experts)}
    shares = np.array(weights).reshape(rows.shape)
    for expert in range(block.experts):
        assert layer.weights[expert] == pytest.approx(shares[rows == expert].sum(), abs=1e-6)
    pairs = Counter(pair for row in rows for pair in combinations(sorted(row.tolist()), 2))
    assert all(layer.pairs[a, b] == layer.pairs[b, a] == n for (a, b), n in pairs.items())
    assert np.triu(layer.pairs, 1).sum() == sum(pairs.values())
    assert layer.dead == sorted(set(range(block.experts)) - set(rows.ravel().tolist()))


def test_effects_are_weight_times_the_norm_of_the_experts_output_in_float32(model: LanguageModel) -> None:
    block = blocks_of(model)[0][1]
    x = mx.random.normal((1, 3, block.input_width), key=mx.random.key(1))
    with record_routing(model) as routing:
        mx.eval(block(x))
        indices, weights = block.route(x)
    experts = read(find(block, block.experts_path), block.activation)
    assert experts is not None
    wanted = np.zeros(block.experts)
    for row, picks, shares in zip(x[0], np.array(indices)[0], np.array(weights)[0], strict=True):
        for expert, share in zip(picks, shares, strict=True):
            one = naive.experts_in_float32(experts, row, mx.array([int(expert)]), mx.ones(1))
            wanted[expert] += share * float(mx.linalg.norm(one).item())
    # The second look at the router counts its picks and nothing else.
    assert routing.layers[0].tokens == 6
    np.testing.assert_allclose(routing.layers[0].effects, wanted, rtol=1e-4)


def test_recording_changes_no_logit_and_ends_with_the_block(model: LanguageModel) -> None:
    ids = mx.array(IDS)
    before = np.array(model(ids))
    with record_routing(model) as routing:
        during = np.array(model(ids))
    seen = routing.tokens
    after = np.array(model(ids))
    assert (during == before).all()
    assert (after == before).all()
    assert routing.tokens == seen == len(IDS[0])


def test_statistics_are_read_back_and_compared(model: LanguageModel, tmp_path: Path) -> None:
    with record_routing(model) as one:
        mx.eval(model(mx.array(IDS)))
    with record_routing(model) as other:
        mx.eval(model(mx.array([IDS[0][:2]])))
    path = tmp_path / "routing.json"
    path.write_text(json.dumps(one.to_dict()))
    again = read_routing(path)
    assert again.to_dict() == one.to_dict()
    assert again.difference(one) == [0.0] * len(one.layers)
    assert all(0 < d <= 1 for d in one.difference(other))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "layers": []}'])
def test_other_files_are_refused_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(text)
    with pytest.raises(SettingError, match="routing statistics cannot be read"):
        read_routing(path)
    with pytest.raises(SettingError, match="routing statistics cannot be read"):
        read_routing(tmp_path / "none.json")
