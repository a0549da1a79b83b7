"""Which runs of layers the ranks of a pipeline get, and what is refused before anything changes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_experts.engine.loading.sharding import spread
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.pipeline import plan_stages
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.resolve.tiny_config import tiny_config


class Ranks:
    """What planning asks of a group."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize(
    ("layers", "ranks", "want"), [(4, 2, [2, 2]), (7, 3, [3, 2, 2]), (5, 5, [1] * 5), (9, 4, [3, 2, 2, 2])]
)
def test_layers_are_split_as_mlx_lm_splits_them(layers: int, ranks: int, want: list[int]) -> None:
    assert plan_stages([None] * layers, [True] * layers, ranks) == want


def test_no_layer_is_parted_from_the_one_that_it_reads() -> None:
    sources = [None, None, None, 2, 2, None]
    assert plan_stages(sources, [True] * 6, 2) == [4, 2]
    assert plan_stages(sources, [True] * 6, 3) == [1, 3, 2]
    with pytest.raises(SettingError, match="cannot be spread over the ranks") as caught:
        plan_stages([None, 0, 0, 0], [True] * 4, 2)
    assert "layer 1 reads layer 0" in caught.value.found
    assert "tensor parallelism" in caught.value.hint


@pytest.mark.parametrize("split", [[4, 1], [3], [5, 0], [4, 2, -1]])
def test_a_split_that_does_not_fit_is_refused(split: list[int]) -> None:
    with pytest.raises(SettingError, match="split does not fit"):
        plan_stages([None] * 4, [True] * 4, 2, split)


def test_a_split_of_ones_own_is_taken() -> None:
    assert plan_stages([None] * 4, [True] * 4, 2, [3, 1]) == [3, 1]


def test_a_rank_without_any_cache_is_refused() -> None:
    with pytest.raises(SettingError, match="keep no cache"):
        plan_stages([None] * 4, [True, True, False, False], 2)


def test_more_ranks_than_layers_leave_the_model_as_it_is() -> None:
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    before = [name for name, _ in tree_flatten(model.parameters())]
    with pytest.raises(SettingError, match="cannot be spread"):
        model.pipeline(Ranks(len(model.layers) + 1))
    assert [name for name, _ in tree_flatten(model.parameters())] == before


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_keep_their_numbers(rank: int) -> None:
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    model.model.pipeline(Ranks(2, rank), split=[1, 3])
    kept = {name.split(".")[2] for name, _ in tree_flatten(model.parameters()) if ".layers." in name}
    assert kept == ({"3"} if rank == 0 else {"0", "1", "2"})
    assert (model.model.start_idx, model.model.end_idx) == ((3, 4) if rank == 0 else (0, 3))
    assert len(model.layers) == len(model.model.pipeline_layers) == len(kept)


def test_a_model_is_spread_in_one_way() -> None:
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, tiny_config(family))
    group = mx.distributed.init()
    with pytest.raises(SettingError, match="not by both"):
        spread(model, group, group)


@pytest.mark.skipif(mx.metal.is_available(), reason="other kernels of mlx-lm")
def test_a_model_of_mlx_lms_that_has_no_pipeline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    family = catalog().load("deepseek_v41")
    model = build_tiny(family, tiny_config(family))
    monkeypatch.setattr(type(model.model), "pipeline", None)
    with pytest.raises(SettingError, match="cannot be spread by layers"):
        model.pipeline(Ranks(2))
