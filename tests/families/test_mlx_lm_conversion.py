"""A conversion here quantises what mlx-lm's conversion of the same model quantises."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.utils import quantize_model
from mlx_lm_models import CONFIGS, config_of, make_model, written

from mlx_experts import load_model

# Where the two trees differ in what they have, so that the sets cannot be equal.
DIFFERS = {
    "dbrx": "mlx-lm has a list of experts here, and one stack of them is read",
    "kimi_linear_tied": "the original ties nothing, so that a copy of the embedding stands as the head",
}


def quantised(model: nn.Module, config: dict[str, Any], **form: Any) -> set[str]:
    """Paths of the modules that a conversion quantises."""
    quantize_model(model, config, **form)
    return {name for name, module in model.named_modules() if "scales" in module}


@pytest.mark.report("C17")
@pytest.mark.parametrize("model_type", sorted(set(CONFIGS) - set(DIFFERS)))
def test_a_conversion_quantises_what_mlx_lm_quantises(model_type: str) -> None:
    config, form = config_of(model_type), {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    ours, _ = load_model(written(model_type)[0])
    got, want = quantised(ours, config, **form), quantised(make_model(config), config, **form)
    assert sorted(got - want) == []
    assert sorted(want - got) == []
