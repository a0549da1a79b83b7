"""Models are copied and pickled whole, whatever their rotary embedding."""

from __future__ import annotations

import copy
import pickle

import mlx.core as mx
import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

ROPES = {
    "default": {},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("rope", ROPES)
def test_a_copy_answers_as_its_model(rope, again):
    family = catalog().load("qwen3_moe")
    model = build_tiny(family, {**tiny_config(family), "rope_scaling": ROPES[rope] or None})
    ids = mx.array([[1, 5, 9, 3]])
    copied = again(model)
    assert copied.model is not model.model
    assert mx.array_equal(copied(ids), model(ids))
