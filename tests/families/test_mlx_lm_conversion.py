"""A conversion here quantises what mlx-lm's conversion of the same model quantises."""

from __future__ import annotations

import pytest
from mlx_lm_models import CONFIGS, quantised, quantised_there, written

from mlx_experts import load_model

# Where the two trees differ in what they have, so that the sets cannot be equal.
DIFFERS = {
    "dbrx": "mlx-lm has a list of experts here, and one stack of them is read",
    "kimi_linear_tied": "the original ties nothing, so that a copy of the embedding stands as the head",
}


@pytest.mark.report("C17")
@pytest.mark.parametrize("model_type", sorted(set(CONFIGS) - set(DIFFERS)))
def test_a_conversion_quantises_what_mlx_lm_quantises(model_type: str) -> None:
    ours, _ = load_model(written(model_type)[0])
    assert sorted(quantised(ours, model_type) ^ quantised_there(model_type)) == []
