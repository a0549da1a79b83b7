"""A layer with normed residuals lacks nothing."""

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import SpecError
from mlx_experts.registry.resolve.tiny_config import tiny_config


def test_a_layer_without_a_mixer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = catalog().load("minimax")
    monkeypatch.setattr("mlx_experts.engine.models.decoder.make_mixer", lambda layer, plan, fused: None)
    with pytest.raises(SpecError, match="no mixer, no pre_mixer"):
        build_tiny(family, tiny_config(family))
