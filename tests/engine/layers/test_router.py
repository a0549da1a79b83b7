"""The router's selections against plain numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.layers.router import best_of_each_group


@pytest.mark.parametrize(("groups", "top_k"), [(2, 2), (2, 4), (4, 4), (3, 6)])
def test_every_group_gives_equally_many_of_its_best(groups: int, top_k: int) -> None:
    scores = np.random.default_rng(7).normal(size=(5, 12)).astype(np.float32)
    picked = np.array(best_of_each_group(mx.array(scores), groups, top_k))
    each, size = top_k // groups, 12 // groups
    for row, indices in zip(scores, picked, strict=True):
        want = {
            g * size + int(i)
            for g in range(groups)
            for i in np.argsort(-row[g * size : (g + 1) * size])[:each]
        }
        assert set(indices.tolist()) == want
